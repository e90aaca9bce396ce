"""The live dual run: identical prompts through the reference and the engine, chunk by chunk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kernel_contracts.contract import Contract
from kernel_contracts.loading import contract_digest, load_contract
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit import identity
from mismatch_audit.programs.base import Sampling, Sequence_
from mismatch_audit.prompts import (
    EncodedPrompt,
    encode_prompts,
    load_prompts,
    prompts_digest,
    spread,
)
from mismatch_audit.rewards import validate_checks
from mismatch_audit.rundir import RunDirectory
from mismatch_audit.sample_model import resolve_model
from mismatch_audit.settings import RunSettings

if TYPE_CHECKING:
    from mismatch_audit.chunks import Bench
    from mismatch_audit.reports.record import Record

Progress = Callable[[str, int, int], None]
"""(stage, done, total) after every step."""


@dataclass
class Run:
    """One audit under way: what it was told, where it writes, how long each stage took."""

    settings: RunSettings
    contract: Contract
    prompts: list[EncodedPrompt]
    tokenizer: Any
    folder: RunDirectory
    facts: dict[str, dict[str, Any]]
    timings: dict[str, float] = field(default_factory=dict)
    started: str = field(default_factory=lambda: now())

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[stage] = self.timings.get(stage, 0.0) + time.perf_counter() - start

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.settings.sampling.model_dump())

    def prefill_ids(self) -> set[str]:
        """Prompts that are scored on the prefill path too."""
        limit = self.settings.probes.prefill_prompts
        chosen = self.prompts if limit is None else self.prompts[:limit]
        return {p.id for p in chosen}


def now() -> str:
    """UTC time, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def prepare(settings: RunSettings, out: Path, *, resume: bool) -> Run:
    """Read everything that can be wrong before any program starts.

    Raises InputError for bad prompts, contract, model or folder; NotComparableError when the
    contract was written for another pair than the settings ask for.
    """
    from transformers import AutoConfig, AutoTokenizer

    contract = load_contract(settings.contract)
    _check_requested(contract, settings)
    prompts = spread(load_prompts(settings.prompts), settings.limit)
    validate_checks(prompts)
    model = identity.model_files(resolve_model(settings.model))
    served = model
    if settings.engine.model is not None:
        served = identity.model_files(resolve_model(settings.engine.model))
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=settings.trust_remote_code)
    config = AutoConfig.from_pretrained(model, trust_remote_code=settings.trust_remote_code)
    text = config.get_text_config()
    encoded = encode_prompts(
        prompts,
        tokenizer,
        text.max_position_embeddings,
        settings.sampling.max_tokens,
        vocab_size=text.vocab_size,
    )
    weights = identity.weights_digest(model)
    facts: dict[str, dict[str, Any]] = {
        side: {
            "model": str(folder),
            "weights": weights if folder == model else identity.weights_digest(folder),
            "tokenizer": identity.tokenizer_digest(tokenizer if folder == model else
                AutoTokenizer.from_pretrained(folder)),
        }
        for side, folder in (("reference", model), ("engine", served))
    }  # fmt: skip
    facts["engine"]["unrepresentable_weights"] = identity.unrepresentable_share(
        served, settings.engine.dtype
    )
    spec = {
        "settings": settings.model_dump(mode="json"),
        "contract": contract_digest(contract),
        "prompts": prompts_digest(encoded),
        "weights": {side: f["weights"] for side, f in facts.items()},
    }
    return Run(
        settings, contract, encoded, tokenizer, RunDirectory(out, spec, resume=resume), facts
    )


def _check_requested(contract: Contract, settings: RunSettings) -> None:
    """A contract for another engine or dtype is refused before minutes are spent on it."""
    asked = {
        "reference": {"dtype": settings.reference.dtype, "program": "transformers"},
        "engine": {"dtype": settings.engine.dtype, "program": settings.engine.program},
    }
    for side, facts in asked.items():
        promised = getattr(contract.pair, side)
        known = {name: value for name, value in promised.items() if name in facts}
        identity.check_facts(side, known, facts, settings.contract)


def execute(run: Run, progress: Progress) -> Evidence:
    """Run both programs over every prompt that has no finished part, then the probes."""
    chunks = _chunks(run)
    missing = [i for i in range(len(chunks)) if not run.folder.has_chunk(i)]
    probes = [name for name in ("repeat", "lone") if run.folder.cached_json(name) is None]
    if missing or probes or run.folder.cached_json("facts") is None:
        with run.folder.scratch() as workdir:
            with run.timed("load"):
                bench = _start(run, workdir, progress)
            try:
                for i in missing:
                    progress("prompts", sum(len(c) for c in chunks[:i]), len(run.prompts))
                    _run_chunk(run, bench, i, chunks[i])
                progress("prompts", len(run.prompts), len(run.prompts))
                _probe(run, bench, progress)
                _keep_facts(run, bench)
            finally:
                bench.engine.close()
    return _evidence(run)


def _chunks(run: Run) -> list[list[EncodedPrompt]]:
    size = run.settings.chunk
    return [run.prompts[at : at + size] for at in range(0, len(run.prompts), size)]


def _start(run: Run, workdir: Path, progress: Progress) -> Bench:
    """Load both programs side by side, read identities back, check them, check the head."""
    from mismatch_audit.chunks import Bench
    from mismatch_audit.programs.reference import TransformersReference
    from mismatch_audit.programs.vllm_engine import VllmEngine
    from mismatch_audit.selfcheck import self_check

    settings = run.settings
    progress("load", 0, 2)
    engine = VllmEngine(
        run.facts["engine"]["model"],
        settings.engine,
        workdir=workdir,
        log_path=run.folder.engine_log,
    )
    try:
        reference = TransformersReference(
            run.facts["reference"]["model"], settings.reference, trust=settings.trust_remote_code
        )
        progress("load", 1, 2)
        engine.wait()
        progress("load", 2, 2)
        _check_identities(run, reference.facts(), engine.facts())
        head = engine.head()
        device = reference.head().weight.device
        bench = Bench(
            reference, engine, reference.head(), _moved(head, device), rounding=_rounding(head)
        )
        run.facts["engine"]["self_check"] = self_check(bench, run.prompts[0].token_ids)
    except BaseException:
        engine.close()
        raise
    return bench


def _moved(head: Any, device: Any) -> Any:
    from dataclasses import replace

    return replace(head, weight=head.weight.to(device))


def _rounding(head: Any) -> float:
    """Nats that two roundings of one logit can differ by: 2 ulp at a logit of 64."""
    import torch

    digits = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
    return max(1e-3, 2 * 64 * digits.get(head.weight.dtype, 0.0))


def _check_identities(run: Run, reference: dict[str, Any], engine: dict[str, Any]) -> None:
    run.facts["reference"].update(reference)
    run.facts["engine"].update(engine)
    run.facts["engine"]["requested"] = dict(run.settings.engine.args)
    run.facts["engine"]["sampling"] = run.settings.sampling.model_dump()
    where, pair = run.settings.contract, run.contract.pair
    identity.check_same(list(pair.same), run.facts["reference"], run.facts["engine"], where)
    for side in ("reference", "engine"):
        identity.check_facts(side, dict(getattr(pair, side)), run.facts[side], where)


def _run_chunk(run: Run, bench: Bench, index: int, prompts: list[EncodedPrompt]) -> None:
    from mismatch_audit.chunks import run_chunk

    with run.timed("prompts"):
        tokens, sequences = run_chunk(bench, prompts, run.sampling, run.prefill_ids())
    run.folder.write_chunk(index, tokens, sequences)


def _probe(run: Run, bench: Bench, progress: Progress) -> None:
    from mismatch_audit.probes import lone_probe, repeat_probe

    asked = run.settings.probes
    sequences = [
        Sequence_(row["sequence_id"], tuple(map(int, row["token_ids"])), int(row["prompt_length"]))
        for row in run.folder.tables()[1].to_dict("records")
    ]
    jobs: tuple[tuple[str, int, Callable[[list[Sequence_]], Any]], ...] = (
        ("repeat", asked.repeat_prompts, lambda some: repeat_probe(bench, some)),
        ("lone", asked.lone_prompts, lambda some: lone_probe(bench, some, asked.lone_tokens)),
    )
    for done, (name, count, job) in enumerate(jobs):
        progress("probes", done, len(jobs))
        if run.folder.cached_json(name) is None:
            with run.timed("probes"):
                result = job(sequences[:count]) if count and sequences else {"rows": []}
            run.folder.cache_json(name, result)
    progress("probes", len(jobs), len(jobs))


def _keep_facts(run: Run, bench: Bench) -> None:
    run.facts["reference"].update(bench.reference.facts())
    run.facts["engine"]["route"] = bench.route
    run.facts["engine"]["head_check"] = bench.head_error
    run.folder.cache_json("facts", run.facts)


def _evidence(run: Run) -> Evidence:
    from mismatch_audit.probes import path_rows

    tokens, _ = run.folder.tables()
    repeat, lone = run.folder.cached_json("repeat"), run.folder.cached_json("lone")
    rows = [*repeat["rows"], *lone["rows"], *path_rows(tokens)]
    floors = repeat.get("floors", {})
    noise = {
        name: max(f[name] for f in floors.values()) for name in next(iter(floors.values()), {})
    }
    metadata = pd.DataFrame([{"prompt_id": p.id, **p.metadata} for p in run.prompts])
    return Evidence(
        tokens=tokens,
        prompts=metadata,
        probes=pd.DataFrame(rows),
        noise=noise,
        max_rows=run.settings.sampling.max_tokens,
    )


def run_audit(settings: RunSettings, out: Path, *, resume: bool, progress: Progress) -> Record:
    """The whole job: prepare, run both programs, judge, write the report."""
    from mismatch_audit.assemble import assemble, write_report

    run = prepare(settings, out, resume=resume)
    evidence = execute(run, progress)
    progress("verdicts", 0, 1)
    with run.timed("verdicts"):
        measurements = judge(run.contract, evidence)
        record = assemble(run, evidence, measurements)
    shutil.copyfile(settings.contract, out / "contract.yaml")
    write_report(record, out)
    progress("verdicts", 1, 1)
    return record
