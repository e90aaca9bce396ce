"""Does the served checkpoint hold cast(master)? Tensor by tensor, bit by bit, with a cause."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.weights.buffers import check_inverse_frequencies
from mismatch_audit.weights.causes import Explainer
from mismatch_audit.weights.compare_quantised import QuantisedComparison
from mismatch_audit.weights.findings import Fault, TensorReport, WeightReport
from mismatch_audit.weights.formats import FORMATS, short
from mismatch_audit.weights.grouping import group
from mismatch_audit.weights.layout import Piece
from mismatch_audit.weights.schemes import Scheme
from mismatch_audit.weights.sides import (
    Overlap,
    Pair,
    Side,
    overlaps,
    pair_up,
    shapes_agree,
)
from mismatch_audit.weights.tally import Tally, tally_rows
from mismatch_audit.weights.workers import Pages, default_threads, row_ranges, run_all

CASTS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_ONE_BYTE = (torch.int8, torch.float8_e4m3fn)
_HALF = {"BF16", "F16"}


@dataclass(frozen=True)
class CompareOptions:
    """cast: ``auto`` takes each served tensor's own dtype; a name also demands it.

    quantiser: how quantised weights should have been made (default: the layout's usual way).
    """

    cast: str = "auto"
    quantiser: Scheme | None = None
    threads: int = field(default_factory=default_threads)

    @property
    def expected(self) -> str | None:
        if self.cast == "auto":
            return None
        if self.cast not in CASTS:
            raise InputError(f"unknown cast {self.cast!r}", fix=f"auto, {', '.join(CASTS)}")
        return CASTS[self.cast]


@dataclass
class _Region:
    pair: Pair
    overlap: Overlap
    tally: Tally = field(default_factory=Tally)


class Comparison:
    """One run of the audit. ``run`` gives the report; nothing is kept but numbers."""

    def __init__(
        self, trainer: Side, served: Side, previous: Side | None, options: CompareOptions
    ) -> None:
        self.trainer, self.served, self.options = trainer, served, options
        self.expected_code = options.expected
        sides = [side.checkpoint for side in (trainer, served, previous) if side is not None]
        self.pages = Pages(*sides)
        self.explainer = Explainer(trainer, served, previous)
        self.quantised = QuantisedComparison(
            trainer, served, self.explainer, self.pages, options.quantiser
        )
        self.usual_half = self._usual_half()

    def _usual_half(self) -> str | None:
        """The 16-bit format that most served elements have."""
        counts = dict.fromkeys(_HALF, 0)
        for pieces in self.served.layout.tensors.values():
            code = pieces[0].stored.info.code
            if code in counts:
                counts[code] += sum(piece.stored.info.numel for piece in pieces)
        best = max(counts, key=lambda code: counts[code])
        return best if counts[best] else None

    def run(self) -> WeightReport:
        """Raises InputError only for options; faults become findings."""
        pairs, missing, extra, notes = pair_up(self.trainer, self.served)
        report = WeightReport(self.trainer.label, self.served.label, self.options.cast, notes=notes)
        reports = {name: self._absent(name, Fault.MISSING) for name in missing}
        for name in extra:
            found = check_inverse_frequencies(name, self.served)
            reports[name] = found or self._absent(name, Fault.EXTRA)
        regions: list[_Region] = []
        quantised: list[Pair] = []
        for pair in pairs:
            reports[pair.name] = self._blank(pair)
            if not shapes_agree(self.trainer, self.served, pair):
                self._shape_fault(pair, reports[pair.name])
            elif self._is_quantised(pair):
                quantised.append(pair)
            else:
                regions += [
                    _Region(pair, overlap) for overlap in overlaps(self.trainer, self.served, pair)
                ]
            if pair.note:
                report.notes.append(f"{pair.name}: {pair.note}")
        self._compare_plain(regions, reports)
        run_all(
            lambda pair: self.quantised.compare(pair, reports[pair.name]),
            quantised,
            self.options.threads,
        )
        report.reports = sorted(reports.values(), key=lambda r: _natural(r.name))
        report.findings = group(report.reports, self.trainer.geometry.family)
        return report

    def _absent(self, name: str, fault: Fault) -> TensorReport:
        side = self.trainer if fault == Fault.MISSING else self.served
        report = TensorReport(name, fault)
        code, shape = side.layout.tensors[name][0].stored.info.code, side.layout.shape(name)
        if fault == Fault.MISSING:
            report.trainer_dtype, report.trainer_shape = short(code), shape
        else:
            report.served_dtype, report.served_shape = short(code), shape
        return report

    def _blank(self, pair: Pair) -> TensorReport:
        ours = self.trainer.layout.tensors[pair.trainer_name][0].stored.info
        theirs = self.served.layout.tensors[pair.served_name][0].stored.info
        report = TensorReport(
            pair.name,
            trainer_dtype=short(ours.code),
            served_dtype=short(theirs.code),
            trainer_shape=self.trainer.layout.shape(pair.trainer_name),
            served_shape=self.served.layout.shape(pair.served_name),
        )
        if (wanted := self._wrong_dtype(pair, ours.code, theirs.code)) is not None:
            report.evidence["dtype_expected"] = short(wanted)
        return report

    def _wrong_dtype(self, pair: Pair, ours: str, theirs: str) -> str | None:
        """The dtype that the served tensor should have had, when it has another."""
        floating = FORMATS[theirs][1].startswith(("float", "bfloat"))
        if pair.scale_name or (FORMATS[theirs][0] == 1 and floating):
            return None
        if not FORMATS[ours][1].startswith(("float", "bfloat")) or theirs == "I8":
            return None if ours == theirs or theirs == "I8" else ours
        if self.expected_code is not None:
            return self.expected_code if theirs != self.expected_code else None
        if not floating:
            return ours
        if theirs in _HALF and ours in _HALF and ours != theirs:
            return ours
        if theirs in _HALF and self.usual_half != theirs:
            return self.usual_half
        return None

    def _is_quantised(self, pair: Pair) -> bool:
        served = self.served.layout.tensors[pair.served_name][0].view().dtype
        ours = self.trainer.layout.tensors[pair.trainer_name][0].view().dtype
        return served in _ONE_BYTE and ours != served and len(self._piece(pair).shape) == 2

    def _piece(self, pair: Pair) -> Piece:
        return self.served.layout.tensors[pair.served_name][0]

    def _shape_fault(self, pair: Pair, report: TensorReport) -> None:
        report.fault = Fault.SHAPE
        report.elements = math.prod(report.served_shape or ())
        if self.explainer.is_transpose(pair):
            report.fault = Fault.TRANSPOSED
            report.evidence["equals"] = "the transpose of the master, bit for bit"

    def _compare_plain(self, regions: list[_Region], reports: dict[str, TensorReport]) -> None:
        tasks = [
            (region, rows)
            for region in regions
            for rows in row_ranges(*region.overlap.served.shape)
        ]

        def compare(task: tuple[_Region, tuple[int, int]]) -> Tally:
            region, rows = task
            tally = tally_rows(region.overlap.trainer, region.overlap.served, rows)
            width = region.overlap.trainer.dtype.itemsize + region.overlap.served.dtype.itemsize
            self.pages.used(tally.elements * width)
            return tally

        for (region, _), tally in zip(
            tasks, run_all(compare, tasks, self.options.threads), strict=True
        ):
            region.tally += tally
        by_pair: dict[str, list[_Region]] = {}
        for region in regions:
            by_pair.setdefault(region.pair.name, []).append(region)
        run_all(
            lambda members: self._conclude(members, reports[members[0].pair.name]),
            list(by_pair.values()),
            self.options.threads,
        )

    def _conclude(self, regions: list[_Region], report: TensorReport) -> None:
        total = Tally()
        for region in regions:
            total += region.tally
        report.elements, report.differing = total.elements, total.differing
        report.max_ulp, report.relative_error = total.max_ulp, total.relative_error
        report.cosine = total.cosine if total.differing else 1.0
        if total.differing:
            differing = [region for region in regions if region.tally.differing]
            causes = [
                self.explainer.explain(region.pair, region.overlap, region.tally)
                for region in differing
            ]
            self.explainer.combine(
                report,
                [(region.overlap, cause) for region, cause in zip(differing, causes, strict=True)],
                [region.overlap for region in regions],
            )
            if report.fault == Fault.STALE and len(regions) == 1:
                self.explainer.one_shard(report, regions[0].overlap, regions[0].tally)
            self.pages.used(total.elements * 4)
        elif total.nonfinite_served:
            report.fault = Fault.NONFINITE
            report.evidence["nonfinite"] = total.nonfinite_served
            report.evidence["in_master_too"] = True
        elif "dtype_expected" in report.evidence:
            report.fault = Fault.DTYPE


def _natural(name: str) -> tuple[object, ...]:
    """Layer 10 after layer 9."""
    return tuple(f"{int(part):08d}" if part.isdigit() else part for part in name.split("."))


def compare_sides(
    trainer: Side,
    served: Side,
    previous: Side | None = None,
    options: CompareOptions | None = None,
) -> WeightReport:
    """Compares every tensor of two checkpoints and names the likely faults.

    previous: the trainer's checkpoint before the push, which turns "differs" into "stale" with
    certainty. The report's exit_code is 0 equal, 1 fault, 3 nothing to compare.
    """
    return Comparison(trainer, served, previous, options or CompareOptions()).run()
