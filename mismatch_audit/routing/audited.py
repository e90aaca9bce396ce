"""The prompts of a run as requests: what each would have shown a router, and what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kernel_contracts.errors import InputError
from mismatch_audit.reports.record import Record
from mismatch_audit.routing.matching import Facts, spans
from mismatch_audit.rundir import STATE, read_json
from mismatch_audit.tokens import read_parts


@dataclass(frozen=True)
class Audited:
    """facts: ``{prompt_id: what its request showed}``.  tokens: the token table."""

    facts: dict[str, Facts]
    tokens: pd.DataFrame


def load_audited(run: Path, record: Record | None = None) -> Audited | None:
    """The prompts of a run's folder; None for a bare report, or when its prompt file is gone or has
    changed since (then nothing says what a request showed).

    record: the report, which may lie in a folder below the run's (``audit judge``); its digests
    must be those of the run.
    """
    if not (run / STATE).exists() and (run.parent / STATE).exists() and record is not None:
        run = run.parent
    if not (run / STATE).exists():
        return None
    known = read_json(run / STATE)["spec"].get("prompts")
    if record is not None and record.digests.get("prompts") != known:
        return None
    parts = sorted((run / "tokens").glob("part-*.parquet"))
    if not parts:
        return None
    spec = read_json(run / STATE)["spec"]
    sequences = read_parts([run / "sequences" / part.name for part in parts])
    facts = _facts(spec, sequences)
    return None if facts is None else Audited(facts, read_parts(parts))


def _facts(spec: dict, sequences: pd.DataFrame) -> dict[str, Facts] | None:  # type: ignore[type-arg]
    from mismatch_audit.prompts import EncodedPrompt, load_prompts, prompts_digest, spread

    settings = spec["settings"]
    try:
        prompts = spread(load_prompts(settings["prompts"]), settings.get("limit"))
    except InputError:
        return None
    ids: dict[str, Sequence[int]] = {
        row["prompt_id"]: [int(t) for t in row["token_ids"][: row["prompt_length"]]]
        for row in sequences.to_dict("records")
    }
    if any(p.id not in ids for p in prompts):
        return None
    encoded = [
        EncodedPrompt(p.id, list(ids[p.id]), dict(p.metadata), len(ids[p.id])) for p in prompts
    ]
    if prompts_digest(encoded) != spec["prompts"]:
        return None
    budget = float(settings["sampling"]["max_tokens"])
    return {
        p.id: Facts(p.metadata, spans((len(p.token_ids), len(p.token_ids)), budget))
        for p in encoded
    }
