"""Pairs whose served side is quantised: regions per rank, their scales, one cause per tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernel_contracts.errors import InputError
from mismatch_audit.weights.causes import Explainer
from mismatch_audit.weights.findings import Fault, TensorReport
from mismatch_audit.weights.layout import Piece
from mismatch_audit.weights.quantised import (
    QuantisedRegion,
    QuantisedTally,
    explain_quantised,
    explain_unscaled,
    scheme_of,
    tally_quantised,
)
from mismatch_audit.weights.schemes import Scheme
from mismatch_audit.weights.sides import Overlap, Pair, Side, operand, overlaps
from mismatch_audit.weights.workers import Pages


@dataclass
class QuantisedComparison:
    """stated: how the weights should have been quantised (None: the layout's usual way)."""

    trainer: Side
    served: Side
    explainer: Explainer
    pages: Pages
    stated: Scheme | None

    def compare(self, pair: Pair, report: TensorReport) -> None:
        total = QuantisedTally()
        causes: list[tuple[int, tuple[Fault, dict[str, object]]]] = []
        pieces = self.served.layout.tensors[pair.served_name]
        for overlap, piece in zip(overlaps(self.trainer, self.served, pair), pieces, strict=True):
            region = self._quantised_region(pair, overlap, piece)
            if region is None:
                causes.append((piece.rank, explain_unscaled(overlap.trainer, overlap.served)))
                continue
            scheme = self._scheme(region)
            if scheme is None:
                evidence: dict[str, object] = {"scale_shape": list(region.scale.shape)}
                causes.append((piece.rank, (Fault.SCALE_MISSING, evidence)))
                continue
            tally = tally_quantised(region, scheme)
            self._add(total, tally)
            report.evidence.setdefault("quantiser", scheme.variant)
            if not tally.equal:
                others = self.explainer.quantised_alternatives(pair, region.master, overlap)
                causes.append((piece.rank, explain_quantised(region, scheme, tally, others)))
            self.pages.used(overlap.elements * 5)
        report.elements = sum(math.prod(piece.shape) for piece in pieces)
        report.differing = total.payload_differing + total.scale_differing
        report.relative_error = total.relative_error
        report.cosine = total.cosine
        if causes:
            report.ranks = [rank for rank, _ in causes] if len(pieces) > 1 else []
            report.fault, evidence = causes[0][1]
            report.evidence.update(evidence)
            unwritten = evidence.get("bad_scales", 0) == evidence.get("of")
            unreached = report.fault == Fault.STALE or (
                report.fault == Fault.UNWRITTEN and unwritten
            )
            if unreached and len(causes) < len(pieces):
                report.fault = Fault.SHARD_STALE
                report.evidence.update({"rank": causes[0][0], "ranks": len(pieces)})

    @staticmethod
    def _add(total: QuantisedTally, tally: QuantisedTally) -> None:
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(tally, name))

    def _scheme(self, region: QuantisedRegion) -> Scheme | None:
        inferred, stated = scheme_of(region), self.stated
        if stated is not None and inferred is not None and stated.name == inferred.name:
            return stated
        return inferred

    def _quantised_region(
        self, pair: Pair, overlap: Overlap, piece: Piece
    ) -> QuantisedRegion | None:
        if pair.scale_name is None:
            return None
        scales = self.served.layout.tensors[pair.scale_name]
        own = [scale for scale in scales if scale.rank == piece.rank]
        if not own:
            return None
        master = self.trainer.layout.tensors[pair.trainer_name]
        if len(master) > 1:
            raise InputError(
                "a sharded trainer checkpoint cannot be compared with quantised weights",
                where=pair.name,
                fix="gather the trainer's shards first",
            )
        row, column = overlap.start
        size = overlap.served.shape[0]
        block = 128 if own[0].shape and own[0].shape[0] < size else 1
        if row % block or (column and column % 32):
            raise InputError(
                f"a rank's part starts at ({row}, {column}), inside a block of scales",
                where=pair.name,
            )
        name, columns = pair.trainer_name, master[0].shape[1]
        return QuantisedRegion(
            operand(self.trainer, name, master[0], (row, 0), (size, columns)),
            overlap.served.rows(0, size),
            own[0].view(),
            column,
            operand(self.trainer, name, master[0], (0, 0), master[0].shape),
        )
