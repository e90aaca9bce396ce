"""The reference over served tokens: what the trainer's program says of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_audit.monitor.frames import Numbers, ScoredRow
from mismatch_audit.monitor.traffic import TrafficRow
from mismatch_audit.monitor.usable import UNIT_KEY, Fit, unit_of
from mismatch_audit.settings import ReferenceSettings

if TYPE_CHECKING:
    from mismatch_audit.programs.base import ScoredSequence
    from mismatch_audit.programs.reference import TransformersReference

ROWS = 1024
"""Rows whose hidden states wait for one pass of the head: enough for the matmul's full speed, and
16 MB at a width of 4096."""

NOT_FINITE = "the reference's logits are not finite"


class Rescorer:
    """A loaded reference. model: a checkpoint folder, hub id, or ``sample``.

    Raises InputError where the model is not there.
    """

    def __init__(self, model: str, settings: ReferenceSettings) -> None:
        from transformers import AutoTokenizer

        from mismatch_audit import identity
        from mismatch_audit.programs.reference import TransformersReference
        from mismatch_audit.sample_model import resolve_model

        folder = identity.model_files(resolve_model(model))
        self.reference: TransformersReference = TransformersReference(str(folder), settings)
        self.facts: dict[str, Any] = {
            **self.reference.facts(),
            "model": str(folder),
            "weights": identity.weights_digest(folder),
        }
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            self.facts["tokenizer"] = identity.tokenizer_digest(tokenizer)
        except (OSError, ValueError):  # traffic carries token ids; the text is not needed
            self.facts["tokenizer"] = None
        config = self.reference.model.config.get_text_config()
        self.max_positions = int(config.max_position_embeddings)

    def fit(self, weights_version: int | str | None) -> Fit:
        """What the reference can take."""
        return Fit(self.reference.head().vocab_size, self.max_positions, weights_version)

    def score(self, rows: Sequence[TrafficRow]) -> tuple[list[ScoredRow], dict[str, str]]:
        """(scored rows in order, request id -> why the reference has no numbers for it).

        Rows must be usable. Columns: ``reference_logprob, reference_margin, reference_top1,
        reference_top1_logprob, entropy``, nats.
        """
        from mismatch_audit.programs.base import Sequence_

        sequences = [
            Sequence_(str(i), r.prompt_token_ids + r.response_token_ids, len(r.prompt_token_ids))
            for i, r in enumerate(rows)
        ]
        found: dict[int, dict[str, Numbers]] = {}
        waiting: list[ScoredSequence] = []
        for one in self.reference.score(sequences):
            waiting.append(one)
            if sum(len(w.hidden) for w in waiting) >= ROWS:
                found |= self._columns(waiting, rows)
                waiting = []
        found |= self._columns(waiting, rows)
        bad = {r.request_id: NOT_FINITE for i, r in enumerate(rows) if found[i]["nonfinite"].any()}
        kept = [_row(r, found[i]) for i, r in enumerate(rows) if r.request_id not in bad]
        return kept, bad

    def _columns(
        self, scored: Sequence[ScoredSequence], rows: Sequence[TrafficRow]
    ) -> dict[int, dict[str, Numbers]]:
        """Index of the row -> its columns."""
        if not scored:
            return {}
        import torch

        from mismatch_audit.compare import log_probs_of

        order = [int(one.sequence_id) for one in scored]
        targets = torch.tensor([t for i in order for t in rows[i].response_token_ids])
        hidden = torch.cat([one.hidden for one in scored])
        columns = log_probs_of(hidden, self.reference.head(), targets)
        values = {n: c.cpu().numpy().astype(np.float64) for n, c in columns.items()}
        edges = np.cumsum([0, *(len(rows[i].response_token_ids) for i in order)])
        return {
            i: {n: c[edges[at] : edges[at + 1]] for n, c in values.items()}
            for at, i in enumerate(order)
        }

    def close(self) -> None:
        """Free the weights."""
        self.reference.close()


def _row(row: TrafficRow, values: dict[str, Numbers]) -> ScoredRow:
    version = row.weights_version
    return ScoredRow(
        unit=unit_of(row),
        request_id=row.request_id,
        token_ids=row.response_token_ids,
        prompt_length=len(row.prompt_token_ids),
        engine_logprob=np.array(row.engine_logprobs, dtype=np.float64),
        reference={
            "reference_logprob": values["logprob"],
            "reference_margin": values["margin"],
            "reference_top1": values["top1"],
            "reference_top1_logprob": values["top1_logprob"],
            "entropy": values["entropy"],
        },
        metadata={k: v for k, v in row.metadata.items() if k != UNIT_KEY},
        n_cached_tokens=row.n_cached_tokens,
        weights_version=version if isinstance(version, int) else None,
    )
