"""The live dual run: identical prompts through the reference and the engine, chunk by chunk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kernel_contracts.verdict import Evidence, judge
from mismatch_audit import identity
from mismatch_audit.prepare import Run, prepare, reopen
from mismatch_audit.programs.base import Sequence_
from mismatch_audit.prompts import EncodedPrompt
from mismatch_audit.settings import RunSettings

if TYPE_CHECKING:
    from mismatch_audit.chunks import Bench
    from mismatch_audit.chunks_topk import TopkBench
    from mismatch_audit.compare.heads import Head
    from mismatch_audit.programs.reference import TransformersReference
    from mismatch_audit.programs.vllm_engine import VllmEngine
    from mismatch_audit.reports.record import Record

Progress = Callable[[str, int, int], None]
"""(stage, done, total) after every step."""


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


def _start(run: Run, workdir: Path, progress: Progress) -> Bench | TopkBench:
    """Load both programs side by side, read identities back, check them, check the head."""
    from mismatch_audit.programs.reference import TransformersReference
    from mismatch_audit.programs.vllm_engine import VllmEngine

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
        if settings.engine.rows == "topk":
            return _topk_bench(reference, engine, settings)
        return _full_bench(run, reference, engine)
    except BaseException:
        engine.close()
        raise


def _topk_bench(
    reference: TransformersReference, engine: VllmEngine, settings: RunSettings
) -> TopkBench:
    from mismatch_audit.chunks_topk import TopkBench
    from mismatch_audit.programs.top_rows import VllmTopRows

    rows = VllmTopRows(engine, settings.engine.top_logprobs)
    return TopkBench(reference, rows, reference.head())


def _full_bench(run: Run, reference: TransformersReference, engine: VllmEngine) -> Bench:
    from mismatch_audit.chunks import Bench
    from mismatch_audit.selfcheck import self_check

    head, own = engine.head(), reference.head()
    served = replace(head, weight=head.weight.to(own.weight.device))
    bench = Bench(reference, engine, own, served, rounding=_rounding(head))
    run.facts["engine"]["self_check"] = self_check(bench, run.prompts[0].token_ids)
    return bench


def _rounding(head: Head) -> float:
    """Nats that two roundings of one logit can differ by: 2 ulp at a logit of 64."""
    import torch

    digits = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
    return max(1e-3, 2 * 64 * digits.get(head.weight.dtype, 0.0))


def _check_identities(run: Run, reference: dict[str, Any], engine: dict[str, Any]) -> None:
    run.facts["reference"].update(reference)
    run.facts["engine"].update(engine)
    run.facts["engine"]["requested"] = identity.without_secrets(run.settings.engine.args)
    run.facts["engine"]["sampling"] = run.settings.sampling.model_dump()
    _check_pair(run, run.facts)


def _check_pair(run: Run, facts: dict[str, dict[str, Any]]) -> None:
    where, pair = run.settings.contract, run.contract.pair
    identity.check_same(list(pair.same), facts["reference"], facts["engine"], where)
    for side in ("reference", "engine"):
        identity.check_facts(side, dict(getattr(pair, side)), facts[side], where)


def _run_chunk(
    run: Run, bench: Bench | TopkBench, index: int, prompts: list[EncodedPrompt]
) -> None:
    from mismatch_audit.chunks import Bench, run_chunk
    from mismatch_audit.chunks_topk import run_topk_chunk

    asked = (prompts, run.sampling, run.prefill_ids())
    with run.timed("prompts"):
        if isinstance(bench, Bench):
            tokens, sequences = run_chunk(bench, *asked)
        else:
            tokens, sequences = run_topk_chunk(bench, *asked)
    run.folder.write_chunk(index, tokens, sequences)


def _probe(run: Run, bench: Bench | TopkBench, progress: Progress) -> None:
    from mismatch_audit.chunks import Bench
    from mismatch_audit.probes import lone_probe, repeat_probe

    if not isinstance(bench, Bench):
        # These probes compare hidden states; without them their clauses stay UNOBSERVED.
        for name in ("repeat", "lone"):
            run.folder.cache_json(name, {"rows": []})
        return
    asked = run.settings.probes
    sequences = [
        Sequence_(row["sequence_id"], tuple(map(int, row["token_ids"])), int(row["prompt_length"]))
        for row in run.folder.tables()[1].to_dict("records")
    ]
    # The shortest first: a probe asks about execution, not about text, and should cost little.
    sequences.sort(key=lambda s: (len(s.token_ids), s.sequence_id))
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


def _keep_facts(run: Run, bench: Bench | TopkBench) -> None:
    from mismatch_audit.chunks import Bench

    run.facts["reference"].update(bench.reference.facts())
    run.facts["engine"]["route"] = bench.route
    if isinstance(bench, Bench):
        run.facts["engine"]["head_check"] = bench.head_error
    run.folder.cache_json("facts", run.facts)


def _evidence(run: Run) -> Evidence:
    from mismatch_audit.probes import path_rows

    tokens, _ = run.folder.tables()
    repeat, lone = run.folder.finished("repeat"), run.folder.finished("lone")
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


@dataclass(frozen=True)
class Baseline:
    """An earlier run to compare with. margin: share of a limit by which a mean may rise."""

    folder: Path
    margin: float = 0.25


def run_audit(
    settings: RunSettings,
    out: Path,
    *,
    resume: bool,
    progress: Progress,
    gradient: bool = False,
    baseline: Baseline | None = None,
) -> Record:
    """The whole job: prepare, run both programs, judge, write the report.

    gradient: measure the policy-gradient bias of the rollouts too.
    """
    from mismatch_audit.bias import measured
    from mismatch_audit.control_runs import read_control_run

    run = prepare(settings, out, resume=resume)
    if baseline is not None:
        read_control_run(baseline.folder)  # a wrong folder is an error now, not after the run
    evidence = execute(run, progress)
    if gradient:
        measured(run, progress)
    return _conclude(run, evidence, out, progress, baseline)


def judge_again(
    folder: Path,
    contract: Path,
    out: Path,
    *,
    progress: Progress,
    baseline: Baseline | None = None,
) -> Record:
    """Judge a finished run's tables under another contract; the report goes to ``out``.

    Raises InputError when the run is not finished, NotComparableError when the contract binds
    another pair.
    """
    run = reopen(folder, str(contract))
    _check_pair(run, run.folder.finished("facts"))
    out.mkdir(parents=True, exist_ok=True)
    return _conclude(run, _evidence(run), out, progress, baseline)


def _conclude(
    run: Run, evidence: Evidence, out: Path, progress: Progress, baseline: Baseline | None
) -> Record:
    from kernel_contracts.baseline import compare_with_baseline
    from mismatch_audit.assemble import assemble, write_report
    from mismatch_audit.baseline import read_baseline
    from mismatch_audit.bias import with_gradient

    if (bias := run.folder.cached_json("gradient")) is not None:
        evidence = with_gradient(evidence, bias)
    progress("verdicts", 0, 1)
    with run.timed("verdicts"):
        measurements = judge(run.contract, evidence)
        if baseline is not None:
            earlier = read_baseline(baseline.folder, evidence, run.folder.tables()[1])
            measurements += compare_with_baseline(
                run.contract, evidence, earlier, margin=baseline.margin
            )
        record = assemble(run, evidence, measurements)
    shutil.copyfile(run.settings.contract, out / "contract.yaml")
    write_report(record, out)
    progress("verdicts", 1, 1)
    return record
