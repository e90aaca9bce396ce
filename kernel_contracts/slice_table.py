"""Columns that a slice may name: of the token table, of the prompts' metadata, and computed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kernel_contracts.errors import ContractError, InputError
from kernel_contracts.predicates import closest
from kernel_contracts.vocabulary import COMPUTED_COLUMNS

_LOGPROBS = frozenset({"reference_logprob", "engine_logprob"})
_COMPUTED_FROM: dict[str, frozenset[str]] = {
    "reference_prob": frozenset({"reference_logprob"}),
    "engine_prob": frozenset({"engine_logprob"}),
    "dlp": _LOGPROBS,
    "abs_dlp": _LOGPROBS,
}


class SliceTable:
    """A token table with its prompts' metadata; computed columns are made when asked for.

    tokens: one row a scored token, any index.  prompts: one row a prompt with ``prompt_id`` (a
    column, or the index's name) and metadata.  A token column hides metadata of the same name.
    Raises InputError for a prompt table without ``prompt_id``, or with a prompt twice.
    """

    def __init__(self, tokens: pd.DataFrame, prompts: pd.DataFrame | None = None) -> None:
        self.tokens = tokens
        self.prompts = pd.DataFrame() if prompts is None else _by_prompt(prompts)
        self._made: dict[str, pd.Series] = {}
        self._prompt_rows: np.ndarray[tuple[int], np.dtype[np.intp]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def names(self) -> set[str]:
        """Every column there is here, computed ones included."""
        stored = set(map(str, self.tokens.columns)) | set(map(str, self.prompts.columns))
        return stored | {c for c, needs in _COMPUTED_FROM.items() if needs <= stored}

    def is_metadata(self, name: str) -> bool:
        """The column comes with the prompts."""
        return name in self.prompts and name not in self.tokens

    @property
    def prompt_rows(self) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """``[rows]`` index of each token's prompt in ``prompts``, -1 when it is not there."""
        if self._prompt_rows is None:
            if "prompt_id" not in self.tokens:
                raise ContractError("the token table has no prompt_id to join the metadata by")
            codes, ids = pd.factorize(self.tokens["prompt_id"])
            found = self.prompts.index.get_indexer(pd.Index(ids.astype(str)))
            self._prompt_rows = np.where(codes < 0, -1, np.append(found, -1)[codes])
        return self._prompt_rows

    def column(self, name: str) -> pd.Series:
        """``[rows]`` values. Raises ContractError, with the closest name, for an unknown one."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> pd.Series:
        if name in self.tokens:
            return self.tokens[name]
        if name in COMPUTED_COLUMNS:
            return self._compute(name)
        if name not in self.prompts:
            raise ContractError(f"no column {name!r}", fix=closest(name, self.names))
        values = pd.api.extensions.take(self.prompts[name].array, self.prompt_rows, allow_fill=True)
        return pd.Series(values)

    def _compute(self, name: str) -> pd.Series:
        absent = sorted(_COMPUTED_FROM[name] - set(self.tokens.columns))
        if absent:
            raise ContractError(
                f"{name} is computed from {' and '.join(absent)}, which is not there"
            )
        if name == "abs_dlp":
            return self.column("dlp").abs()
        if name == "dlp":
            return pd.Series(self._numbers("reference_logprob") - self._numbers("engine_logprob"))
        # A log-prob of +1e-9 is rounding: clipped, its token stays in a last bin closed at 1.
        logprob = self._numbers(name.removesuffix("prob") + "logprob")
        return pd.Series(np.exp(np.minimum(logprob, 0.0)))

    def _numbers(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return self.tokens[name].to_numpy(dtype=np.float64, na_value=np.nan)


def _by_prompt(prompts: pd.DataFrame) -> pd.DataFrame:
    if "prompt_id" in prompts:
        prompts = prompts.set_index("prompt_id")
    elif prompts.index.name != "prompt_id":
        raise InputError("the prompt table has no prompt_id")
    prompts = prompts.set_axis(prompts.index.astype(str))
    twice = prompts.index[prompts.index.duplicated()]
    if len(twice):
        raise InputError(
            f"prompt {twice[0]!r} is in the prompt table twice", fix="give each its own id"
        )
    return prompts
