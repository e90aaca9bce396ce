"""Facts of an engine: written from a run's record or a live engine, compared with blessed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.gate.statement import write_time
from mismatch_audit.gate.strict import Malformed, canonical, parse, read_limited, write_atomic
from mismatch_audit.reports.rows import plain

SCHEMA = "mismatch-audit/engine-facts/v1"
MAX_FACTS_BYTES = 1 << 20

CORE = ("program", "version", "dtype", "kv_cache_dtype", "quantization", "logprobs_mode")
"""An engine that does not tell these cannot be told from another build."""

DESCRIPTIVE = frozenset(
    {
        "model",  # a path; the weights are bound by their digest
        "weights",
        "tokenizer",
        "config",  # bound by the checkpoint's policy files
        "weight_version",  # changes with every push
        "unrepresentable_weights",
        "route",  # how the auditor read the rows, no property of the engine
        "head_check",
        "self_check",
        "sampling",  # of the audit's rollouts; requests choose their own (bound by the settings)
        "requested",  # what was asked for; the facts say what came of it
        "spec",
        "server",  # the server's own words for facts that its workers tell
        "url",
        "checkpoint",
        "empty_parameters",
        "max_model_len",
        "vocab_size",
        "rank",
        "ranks",  # tensor_parallel is bound
    }
)
"""Facts that do not tell one build and set-up of an engine from another."""


@dataclass(frozen=True)
class EngineFacts:
    """facts: by name. source: ``run`` or ``engine``. observed: UTC time."""

    facts: dict[str, Any]
    source: str
    observed: str


def pinned(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a blessing binds; no paths, hence nothing of the machine's owner."""
    return {k: v for k, v in plain(dict(facts)).items() if k not in DESCRIPTIVE}


def missing_core(facts: Mapping[str, Any]) -> list[str]:
    """Core facts that are not told. quantization None is told: it means none."""
    return [n for n in CORE if n not in facts or (facts[n] in (None, [], "") and n != CORE[4])]


def differences(blessed: Mapping[str, Any], actual: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(code, sentence) for every blessed fact that the engine does not tell or has otherwise, and
    for every fact that it tells beyond them."""
    found = [
        ("engine_fact_missing", f"{name}: this engine does not tell")
        for name in missing_core(actual)
    ]
    for name, value in sorted(blessed.items()):
        if name in DESCRIPTIVE:
            continue
        if name not in actual:
            if name not in CORE:
                found.append(("engine_fact_missing", f"{name}: this engine does not tell"))
        elif _flat(value) != _flat(actual[name]):
            said = f"{name}: blessed {_short(value)}, this engine {_short(actual[name])}"
            found.append(("engine_fact_differs", said))
    extra = sorted(set(actual) - set(blessed) - DESCRIPTIVE)
    found += [
        ("engine_fact_unknown", f"{name}: {_short(actual[name])}, not in the blessing")
        for name in extra
    ]
    return found


def _flat(value: Any) -> Any:
    """["auto"] is "auto", torch.bfloat16 is bfloat16, and True is not 1."""
    if isinstance(value, list) and len(value) == 1:
        return _flat(value[0])
    if isinstance(value, str):
        return value.removeprefix("torch.")
    return canonical(value)


def _short(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def facts_of(source: str, **options: Any) -> EngineFacts:
    """Of a run's folder (its record), or of a live engine's spec. Raises InputError."""
    from mismatch_audit.reports.record import REPORT_NAME, load_record
    from mismatch_audit.weights.live.base import is_engine_spec, open_engine

    now = write_time(datetime.now(UTC))
    path = Path(source)
    if not is_engine_spec(source) and (path / REPORT_NAME).exists():
        record = load_record(path)
        return EngineFacts(pinned(record.identities.engine), "run", record.finished)
    with open_engine(source, **options) as engine:
        return EngineFacts(pinned(engine.facts()), "engine", now)


def write_facts(facts: EngineFacts, path: Path) -> None:
    """As a file that ``audit gate`` reads."""
    document = {
        "schema": SCHEMA,
        "source": facts.source,
        "observed": facts.observed,
        "facts": facts.facts,
    }
    write_atomic(path, canonical(document) + b"\n")


def read_facts(path: Path) -> EngineFacts:
    """Raises InputError for a file that is none of ours."""
    raw = read_limited(path, MAX_FACTS_BYTES, "engine facts")
    try:
        document = parse(raw)
    except Malformed as error:
        raise InputError(error.what, where=str(path)) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InputError(
            f"not engine facts of schema {SCHEMA}",
            where=str(path),
            fix="audit gate facts RUN_OR_ENGINE --out FILE",
        )
    facts = document.get("facts")
    if set(document) != {"schema", "source", "observed", "facts"} or not isinstance(facts, dict):
        raise InputError("fields are missing or unknown", where=str(path))
    return EngineFacts(facts, str(document["source"]), str(document["observed"]))
