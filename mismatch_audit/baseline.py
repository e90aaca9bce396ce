"""An earlier run's tables as the evidence that a new run is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from kernel_contracts.errors import InputError
from kernel_contracts.verdict import Evidence
from mismatch_audit.control_runs import read_control_run
from mismatch_audit.tokens import read_parts

__all__ = ["read_baseline"]

_KEY = "prompt_id"


def read_baseline(folder: Path, current: Evidence, sequences: pd.DataFrame) -> Evidence:
    """The tables of a finished run, to be judged beside ``current``.

    sequences: the sequence table of the current run. Prompts keep the current run's metadata.
    Raises InputError where the folder holds no run, or one with an injected fault, or where a
    prompt of the same id had other tokens then.
    """
    control = read_control_run(folder)
    earlier = read_parts(sorted((folder / "sequences").glob("part-*.parquet")))
    now, then = _prompt_tokens(sequences), _prompt_tokens(earlier)
    other = sorted(name for name in now.keys() & then.keys() if now[name] != then[name])
    if other:
        raise InputError(
            f"{len(other)} prompts of the same id have other tokens in the baseline, for example "
            f"{other[0]!r}",
            where=str(folder),
            fix="give a baseline that ran on the same prompts with the same chat template",
        )
    return replace(
        current, tokens=control.tokens, gradient={}, gradient_noise={}, probes=pd.DataFrame()
    )


def _prompt_tokens(sequences: pd.DataFrame) -> dict[str, tuple[int, ...]]:
    return {
        row[_KEY]: tuple(map(int, row["token_ids"][: int(row["prompt_length"])]))
        for row in sequences.to_dict("records")
    }
