"""A push under audit on a live engine: every check around one push, then the cause.

The same checks as on the simulated engine (``sync_checks.py``), fed from a running one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mismatch_audit.programs.process import EngineError
from mismatch_audit.weights import sync_checks as checks
from mismatch_audit.weights.checkpoint import open_checkpoint
from mismatch_audit.weights.compare import CompareOptions
from mismatch_audit.weights.findings import WeightReport
from mismatch_audit.weights.live.base import LayerInfo, LiveEngine, PushReceipt, Version
from mismatch_audit.weights.live.compare import check_comparable, compare_live
from mismatch_audit.weights.live.engine_format import (
    FolderWriter,
    SentWeights,
    quantised_parts,
    sent_as_it_is,
    write_for_engine,
)
from mismatch_audit.weights.live.evidence import (
    aligned,
    answers,
    declared_set,
    decoded,
    live_dtypes,
    number,
    scales_of,
)
from mismatch_audit.weights.live.report import SyncReport
from mismatch_audit.weights.probes import probe_rows
from mismatch_audit.weights.rounding import nearest
from mismatch_audit.weights.sides import Side, open_side
from mismatch_audit.weights.sync_checks import CheckResult
from mismatch_audit.weights.values import served_values

_SEQUENCES, _LENGTH = 2, 64
_Say = Callable[[str], None]


@dataclass(frozen=True)
class SyncOptions:
    """export: send this folder instead of our cast of the master. push: how the trainer pushes
    (default: our own, through the engine's loader). seed: of prompts and probes."""

    export: Path | None = None
    version: Version = None
    push: Callable[[SentWeights, Version], PushReceipt] | None = None
    seed: int = 0
    scratch: Path | None = None
    threads: int | None = None


def audit_sync(
    engine: LiveEngine,
    checkpoint: Path,
    options: SyncOptions | None = None,
    say: _Say = lambda _: None,
) -> SyncReport:
    """Pushes the master in ``checkpoint`` to the engine, with every check around it.

    The engine serves the master afterwards. It must not serve anybody else meanwhile: the canary
    push doubles one layer for a moment, and scales are marked unwritten before the push.
    Raises NotComparableError for another model, InputError for what cannot be sent.
    """
    options = options or SyncOptions()
    with tempfile.TemporaryDirectory(prefix="mismatch-audit-sync-", dir=options.scratch) as scratch:
        return _Audit(engine, open_side(checkpoint), options, Path(scratch), say).run()


@dataclass
class _Audit:
    engine: LiveEngine
    master: Side
    options: SyncOptions
    scratch: Path
    say: _Say
    results: dict[str, CheckResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def _add(self, result: CheckResult) -> None:
        self.results[result.check] = result

    def run(self) -> SyncReport:
        engine, options = self.engine, self.options
        check_comparable(self.master, engine)
        facts = engine.facts()
        self.say("reading back what the engine applies before the push")
        before = open_side(engine.read_back(self.scratch / "before"), peer=self.master.checkpoint)
        dtypes_before = {name: dtype for name, (_, dtype) in engine.parameters().items()}
        checksums_before = engine.own_checksums()
        sequences, prompt = self._prompts(facts)
        warm = self._warm(prompt)
        sent = (
            sent_as_it_is(self.master, options.export)
            if options.export is not None
            else write_for_engine(self.master, engine, self.scratch / "push")
        )
        self._add(checks.incoming_dtype(sent.dtypes, live_dtypes(before)))
        scheme = any(s is not None for s in quantised_parts(engine).values())
        filled = engine.fill_scales() if scheme else 0
        old_version = engine.weight_version()
        version = options.version
        if version is None:
            version = max(number(old_version), 0) + 1
        self.say(f"pushing {len(sent.dtypes)} tensors as version {version}")
        push = options.push or (lambda s, v: engine.push(s.folder, v))
        receipt = push(sent, version)
        self._add(checks.version_check(number(old_version), number(engine.weight_version()),
                                       number(version)))  # fmt: skip
        report = SyncReport(
            engine=facts, trainer=self.master.label, receipt=receipt, results=self.results,
            notes=self.notes,
        )  # fmt: skip
        if scheme:
            declared = sent.quantised if options.export else declared_set(engine)
            self._add(checks.set_audit(declared, frozenset(quantised_parts(engine))))
        try:
            now = {name: dtype for name, (_, dtype) in engine.parameters().items()}
            self._add(checks.live_dtype(dtypes_before, now))
            self.say("reading back what the engine applies after the push")
            report.read_back = compare_live(
                self.master, engine, self.scratch / "after", before, self._compare_options(engine)
            )
            after = open_side(self.scratch / "after", peer=self.master.checkpoint)
            self._read_back(report.read_back)
            if scheme:
                self._add(checks.unwritten_scales(scales_of(after), filled))
            self._own_checksums(before, after, checksums_before)
            self.say("probing layers")
            self._probe(after)
            self._cache(prompt, warm)  # the first requests after the push
            self._repeat(sequences, sent)
            self.say("canary push")
            self._canary(sent)
            self._withheld(after)
        except EngineError as error:
            self._add(CheckResult("engine_answers", False, error.what.splitlines()[0]))
        return report

    def _compare_options(self, engine: LiveEngine) -> CompareOptions:
        schemes = [s for s in quantised_parts(engine).values() if s is not None]
        quantiser = schemes[0] if schemes else None
        if self.options.threads is None:
            return CompareOptions(quantiser=quantiser)
        return CompareOptions(quantiser=quantiser, threads=self.options.threads)

    def _prompts(self, facts: dict[str, Any]) -> tuple[list[list[int]], list[int] | None]:
        """Sequences to score, and a prompt longer than two cache blocks (None: not possible)."""
        vocabulary, longest = int(facts["vocab_size"]), int(facts["max_model_len"])
        generator = torch.Generator().manual_seed(self.options.seed)

        def draw(count: int) -> list[int]:
            ids: list[int] = torch.randint(vocabulary, (count,), generator=generator).tolist()
            return ids

        sequences = [draw(min(_LENGTH, longest - 1)) for _ in range(_SEQUENCES)]
        wanted = 2 * int(facts["block_size"]) + 8
        if not facts["prefix_caching"]:
            self.notes.append("the prefix cache is off")
            return sequences, None
        if wanted >= longest:
            detail = f"two cache blocks and a token are longer than max_model_len {longest}"
            self._add(CheckResult("prefix_cache", None, detail))
            return sequences, None
        return sequences, draw(wanted)

    def _warm(self, prompt: list[int] | None) -> int:
        """Hits before the push: the same prompt twice."""
        if prompt is None:
            return 0
        self.engine.next_tokens([prompt])
        return self.engine.next_tokens([prompt])[0].cached_tokens or 0

    def _cache(self, prompt: list[int] | None, warm: int) -> None:
        if prompt is None:
            return
        served = self.engine.next_tokens([prompt])[0]
        fresh = self.engine.next_tokens([prompt], use_cache=False)[0]
        rows = aligned(served, fresh)
        self._add(checks.prefix_cache(warm, *rows, hits_after=served.cached_tokens or 0))

    def _read_back(self, report: WeightReport) -> None:
        found = [f for f in report.findings if f.severity == "error"]
        ok: bool | None = report.exit_code == 0
        detail = found[0].title if found else f"{report.compared} tensors equal, bit by bit"
        if ok and (report.unread or not report.compared):
            ok, detail = None, f"{len(report.unread)} tensors cannot be read back"
        self._add(CheckResult("read_back", ok, detail))

    def _probe(self, after: Side) -> None:
        """Random rows through every layer: against its own weight, and against the master's."""
        if int(self.engine.facts()["ranks"]) != 1:
            for name in ("dense_self_probe", "anchored_probe"):
                self._add(CheckResult(name, None, "layers are sharded over ranks: not probed"))
            return
        layers = self.engine.names()
        rows = {name: probe_rows(layer.in_features) for name, layer in layers.items()}
        applied = self.engine.apply(rows)
        stored = after.checkpoint.ranks[0]
        own, anchored = [], []
        for name, layer in layers.items():
            weight = decoded(stored, name)
            if weight is not None:
                own.append((name, answers(applied[name]), weight))
            master = self._master_of(layer)
            if master is not None and master.shape == (layer.out_features, layer.in_features):
                anchored.append((name, answers(applied[name]), master))
        self._add(checks.dense_self_probe(own))
        self._add(checks.anchored_probe(anchored))
        if len(anchored) < len(layers):
            self.notes.append(f"{len(layers) - len(anchored)} layers have no master to be anchored")
        if any("expert" in name for name in self.engine.parameters()):
            self._add(CheckResult("expert_probe", None, "live experts are not probed"))

    def _master_of(self, layer: LayerInfo) -> torch.Tensor | None:
        parts = [served_values(self.master, f"{part}.weight") for part in layer.parts]
        whole = [part for part in parts if part is not None]
        return torch.cat(whole) if len(whole) == len(parts) else None

    def _own_checksums(
        self, before: Side, after: Side, digests_before: dict[str, str] | None
    ) -> None:
        """Says where the engine's own digests are of nothing, for weights that moved."""
        digests_after = self.engine.own_checksums()
        if not digests_before or not digests_after:
            return
        old, new = before.checkpoint.ranks[0], after.checkpoint.ranks[0]
        moved = [
            name
            for name in new.keys() & old.keys()
            if name.endswith("weight") and not torch.equal(old[name].tensor(), new[name].tensor())
        ]
        empty = set(self.engine.facts().get("empty_parameters") or ())
        still = sorted(
            name
            for name in moved
            if digests_before.get(name) == digests_after.get(name)
            and (name in empty or name not in digests_after)
        )
        if still:
            self._add(
                CheckResult(
                    "engine_checksums", True,
                    f"the engine's own digests did not move for {len(still)} of {len(moved)} "
                    "weights that changed: comparing them passes falsely here",
                    float(len(still)), where=tuple(still),
                )
            )  # fmt: skip

    def _repeat(self, sequences: Sequence[Sequence[int]], sent: SentWeights) -> None:
        """Finite log-probs, the same twice, and the same after the same weights again."""
        first, again = self._scored(sequences), self._scored(sequences)
        bad = int((~torch.isfinite(first)).sum())
        self._add(CheckResult("finite_logprobs", not bad, f"{bad} of {first.numel()} not finite",
                              float(bad), 0.0))  # fmt: skip
        if not bad and not torch.equal(first, again):
            noise = float((first - again).abs().max())
            detail = f"the engine does not repeat itself: {noise:.3g} nats"
            self._add(CheckResult("zero_change_push", None, detail))
            return
        self.engine.push(sent.folder, None)
        self._add(checks.zero_change_push(again, self._scored(sequences)))

    def _scored(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = self.engine.logprobs(sequences)
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    def _canary(self, sent: SentWeights) -> None:
        """Doubles one unfused layer by its scale (or its values), and puts it back."""
        layers = [
            x for x in self.engine.names().values() if len(x.parts) == 1 and "layers." in x.name
        ]
        layers = [x for x in layers if f"{x.parts[0]}.weight" in sent.dtypes]
        if not layers:
            self._add(CheckResult("canary_push", None, "no layer can be sent alone"))
            return
        layer = layers[len(layers) // 2]
        own = {
            name
            for name in open_checkpoint(sent.folder).ranks[0]
            if name.removesuffix("_scale").removesuffix("_inv").endswith(f"{layer.parts[0]}.weight")
        }
        # Not alone into a quantised engine: layers that vLLM packed and is not sent do not live on.
        tensors = {
            name: stored.tensor()
            for name, stored in open_checkpoint(sent.folder).ranks[0].items()
            if name in own or sent.quantised
        }
        x = {layer.name: probe_rows(layer.in_features, seed=3)}

        def push(factor: float) -> None:
            folder = Path(tempfile.mkdtemp(dir=self.scratch))
            writer = FolderWriter(folder)
            for name, value in tensors.items():
                scaled = name in own and ("scale" in name or len(own) == 1)
                writer.add(name, value * factor if scaled else value)
            writer.close()
            self.engine.push(folder, None)

        result = checks.canary_push(push, lambda: self.engine.apply(x)[layer.name])
        self._add(CheckResult(**{**vars(result), "where": (layer.name,)}))

    def _withheld(self, after: Side) -> None:
        """An embedding that nobody sent must not be found served."""
        name = self.master.geometry.family.embedding
        served = served_values(after, name)
        master = served_values(self.master, name)
        if served is None or master is None:
            self._add(CheckResult("withheld_push", None, "no whole embedding on both sides"))
            return
        generator = torch.Generator().manual_seed(77)
        noise = torch.randn(master.shape, generator=generator) * master.std() * 0.01
        dtype = getattr(torch, str(self.engine.facts()["dtype"]))
        unsent = nearest(master + noise, dtype).float()
        self._add(checks.withheld_push(not torch.equal(served, unsent), "the read-back"))
