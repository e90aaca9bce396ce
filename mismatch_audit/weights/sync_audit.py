"""A push under audit on the simulated engine: every check around one push, then the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mismatch_audit.weights import sync_checks as checks
from mismatch_audit.weights.compare import CompareOptions, compare_sides
from mismatch_audit.weights.findings import WeightReport
from mismatch_audit.weights.layout import layout_of
from mismatch_audit.weights.memory import memory_side
from mismatch_audit.weights.probes import movement_coefficient, probe_rows
from mismatch_audit.weights.rounding import nearest
from mismatch_audit.weights.schemes import Scheme
from mismatch_audit.weights.simulated_engine import SimulatedEngine
from mismatch_audit.weights.simulated_model import (
    ADAPTED,
    CONFIG,
    DENSE_LAYERS,
    EXPERT_STACK,
    EXPERTS,
    HIDDEN,
    LowRankUpdate,
    Tensors,
    expert_weights,
    forward,
    fused,
    merge,
    trainer_parts,
    updated,
)
from mismatch_audit.weights.simulated_push import Push, export_push
from mismatch_audit.weights.simulated_storage import EMBEDDING
from mismatch_audit.weights.sync_causes import name_cause
from mismatch_audit.weights.sync_checks import CheckResult, RolloutStep

CANARY = "model.layers.0.mlp.down_proj"
PROMPT = list(range(8, 24))
_CAP = 24
_RESPONSES = 2


@dataclass
class PushAudit:
    """results by check name, the read-back comparison, and the cause that they add up to."""

    results: dict[str, CheckResult] = field(default_factory=dict)
    read_back: WeightReport | None = None
    cause: str = ""

    @property
    def failing(self) -> list[str]:
        return [name for name, result in self.results.items() if result.ok is False]


def audit_push(
    engine: SimulatedEngine,
    master: Tensors,
    update: LowRankUpdate,
    push: Push,
    fill: bool = True,
) -> PushAudit:
    """Fills sentinels, sends ``push`` (exported from ``master``), runs every check.

    The engine must have been started. Its adapter must be ``update``. fill: mark every scale
    as unwritten before the push (guard 4); without it an unsent scale keeps its old value.
    """
    audit = PushAudit()

    def add(result: CheckResult) -> None:
        audit.results[result.check] = result

    engine.log_probs(PROMPT)
    engine.log_probs(PROMPT)
    warm, before = engine.cache_hits, engine.version
    add(checks.incoming_dtype(_dtypes(push), _canonical_dtypes(engine)))
    filled = engine.fill_sentinels() if fill else 0
    engine.receive(push)
    add(checks.version_check(before, engine.version, push.version))
    hits = engine.cache_hits
    cached = engine.log_probs(PROMPT)
    fresh = engine.log_probs(PROMPT, use_cache=False)
    add(checks.prefix_cache(warm, cached, fresh, engine.cache_hits - hits))
    scales = {n: v for n, v in engine.read_back().items() if "scale" in n}
    add(checks.unwritten_scales(scales, filled))
    add(checks.set_audit(push.quantised, engine.quantised_layers()))
    add(checks.live_dtype(engine.declared_dtypes, engine.live_dtypes()))
    _probe(engine, master, update, add)
    audit.read_back = read_back(engine, master)
    found = audit.read_back.findings
    add(
        CheckResult(
            "read_back",
            audit.read_back.exit_code == 0,
            found[0].title if found else f"{audit.read_back.compared} tensors equal",
        )
    )
    add(checks.rollout_sentinel([_rollouts(engine, master, update, seed) for seed in (0, 1)]))
    engine.receive(Push(push.tensors, push.version + 1, push.quantised))
    add(checks.zero_change_push(fresh, engine.log_probs(PROMPT, use_cache=False)))
    add(_canary(engine, push))
    unsent = nearest(
        updated({EMBEDDING: master[EMBEDDING]}, 0.01, seed=77)[EMBEDDING], torch.bfloat16
    )
    noticed = not torch.equal(engine.read_back()[EMBEDDING], unsent)
    add(checks.withheld_push(noticed, "the read-back"))
    audit.cause = name_cause(audit.results, audit.read_back)
    return audit


def _probe(
    engine: SimulatedEngine,
    master: Tensors,
    update: LowRankUpdate,
    add: Callable[[CheckResult], None],
) -> None:
    merged = merge(master, update)
    own, anchored = [], []
    for layer in DENSE_LAYERS:
        weight = engine.own_weight(f"{layer}.weight")
        if layer == ADAPTED and engine.adapter_active:
            weight = weight + update.delta
        own.append((layer, engine.linear(layer), weight))
        anchored.append((layer, engine.linear(layer), fused(merged, layer)))
    add(checks.dense_self_probe(own))
    w13, w2 = f"{EXPERT_STACK}.w13_weight", f"{EXPERT_STACK}.w2_weight"
    experts = [f"{EXPERT_STACK}.{e}" for e in range(EXPERTS)]
    add(
        checks.expert_probe(
            (name, engine.expert(e), engine.own_weight(w13, e), engine.own_weight(w2, e))
            for e, name in enumerate(experts)
        )
    )
    base, full = master[f"{ADAPTED}.weight"], merged[f"{ADAPTED}.weight"]
    add(
        checks.anchored_probe(
            anchored,
            ((n, engine.expert(e), *expert_weights(master, e)) for e, n in enumerate(experts)),
            {ADAPTED: movement_coefficient(engine.linear(ADAPTED), base, full)},
        )
    )


def read_back(engine: SimulatedEngine, master: Tensors) -> WeightReport:
    """The engine's own tensors, digested against cast(master). Two ranks where blocks allow it."""
    scheme = engine.scheme
    ranked = scheme is None or scheme.name != "block_fp8"
    tensors = engine.read_back_ranks() if ranked else engine.read_back()
    served = memory_side("engine", list(tensors) if isinstance(tensors, list) else tensors, CONFIG)
    return compare_sides(
        memory_side("trainer", master, CONFIG),
        served,
        options=CompareOptions(quantiser=scheme, threads=1),
    )


def _dtypes(push: Push) -> dict[str, str]:
    return {name: str(v.dtype).removeprefix("torch.") for name, v in push.tensors.items()}


def _canonical_dtypes(engine: SimulatedEngine) -> dict[str, str]:
    """Live dtypes under the trainer's names."""
    side = memory_side("engine", engine.params, CONFIG)
    layout = layout_of(side.checkpoint, side.geometry)
    return {
        name: str(pieces[0].view().dtype).removeprefix("torch.")
        for name, pieces in layout.tensors.items()
    }


def _rollouts(
    engine: SimulatedEngine, master: Tensors, update: LowRankUpdate, seed: int
) -> RolloutStep:
    """Samples a few responses from the engine and scores them with the trainer."""
    generator = torch.Generator().manual_seed(seed)
    reference, parts = trainer_parts(master, update), engine.parts()
    nonfinite, capped, kls = 0, 0, []
    for index in range(_RESPONSES):
        tokens = [10 + index, 20 + index, 30 + index]
        start = len(tokens)
        while len(tokens) < start + _CAP:
            row = forward(parts, torch.tensor(tokens))[0][-1]
            if not bool(torch.isfinite(row).all()):
                nonfinite += 1
                break
            token = int(torch.multinomial(row.exp(), 1, generator=generator))
            tokens.append(token)
            if token in engine.eos:
                break
        else:
            capped += 1
        q = forward(parts, torch.tensor(tokens))[0][start - 1 :]
        p = forward(reference, torch.tensor(tokens))[0][start - 1 :]
        kls.append(float((q.exp() * (q - p)).sum(-1).mean()))
    return RolloutStep(nonfinite, max(kls), capped / _RESPONSES)


def _canary(engine: SimulatedEngine, push: Push) -> CheckResult:
    """Rescales one layer of the pushed weights by its scales (or its values, unquantised)."""
    names = [n for n in push.tensors if n.startswith(f"{CANARY}.")]
    x = probe_rows(2 * HIDDEN, seed=3)

    def send(factor: float) -> None:
        tensors = {name: push.tensors[name] for name in names}
        for name in names:
            value = tensors[name]
            if value.dtype == torch.uint8:
                tensors[name] = (value.int() + (1 if factor == 2.0 else 0)).to(torch.uint8)
            elif "scale" in name or value.element_size() > 1:
                tensors[name] = value * factor
        engine.receive(Push(tensors, engine.version + 1, push.quantised))

    return checks.canary_push(send, lambda: engine.linear(CANARY)(x))


def start_engine(
    scheme: Scheme | None,
    update: LowRankUpdate,
    loaded: Tensors,
    at_start: frozenset[str],
    later: frozenset[str],
) -> SimulatedEngine:
    """An engine that has loaded ``loaded`` cleanly (but for faults of its very layout)."""
    engine = SimulatedEngine(scheme, update, at_start)
    engine.start(export_push(loaded, scheme, version=1))
    engine.faults = at_start | later
    return engine
