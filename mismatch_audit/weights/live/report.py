"""What a sync audit says: a result per check, coded findings, one cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mismatch_audit.weights.findings import WeightReport, plain_json
from mismatch_audit.weights.live.base import PushReceipt
from mismatch_audit.weights.sync_causes import name_cause
from mismatch_audit.weights.sync_checks import CheckResult

# Codes are stable, and go on from those of the file audit (findings.py).
CODES = {
    "version": "W601",
    "prefix_cache": "W602",
    "dense_self_probe": "W603",
    "expert_probe": "W603",
    "zero_change_push": "W604",
    "canary_push": "W605",
    "set_audit": "W606",
    "live_dtype": "W607",
    "incoming_dtype": "W608",
    "unwritten_scales": "W609",
    "withheld_push": "W610",
    "finite_logprobs": "W611",
    "anchored_probe": "W612",
    "engine_answers": "W613",
    "engine_checksums": "W690",
}
TITLES = {
    "version": "the version is not the pushed one",
    "prefix_cache": "stale prefix cache",
    "dense_self_probe": "a layer does not apply its own weight",
    "expert_probe": "an expert does not apply its own weights",
    "zero_change_push": "the same weights again give other log-probs",
    "canary_push": "a canary push did not arrive, or did not leave again",
    "set_audit": "the two sides quantise different layers",
    "live_dtype": "a live dtype changed with the push",
    "incoming_dtype": "incoming dtype differs from the live one",
    "unwritten_scales": "scales that the push did not write",
    "withheld_push": "weights that nobody sent are reported as served",
    "finite_logprobs": "log-probs are not finite",
    "anchored_probe": "a layer does not apply the master's weight",
    "engine_answers": "the engine fails after the push",
    "engine_checksums": "the engine's own checksums pass falsely",
}
REMEDIES = {
    "version": "set the version only after the load has finished, from what was loaded",
    "prefix_cache": "reset the prefix cache after every push, with no request running",
    "dense_self_probe": "re-make the kernel's own copies (packed, swizzled) after a load",
    "expert_probe": "re-make the kernel's own copies (packed, swizzled) after a load",
    "zero_change_push": "something derived is updated in place: make it anew from the weights",
    "canary_push": "the kernel reads other memory than the load writes: check captured graphs",
    "set_audit": "give both sides one list of quantised layers",
    "live_dtype": "load into the dtype that the engine was started with",
    "incoming_dtype": "cast once, from the master, to the dtype that the engine holds",
    "unwritten_scales": "push the scales with the payload",
    "withheld_push": "the read-back echoes the sender: read through the kernel",
    "finite_logprobs": "stop the run; find the step whose update produced it",
    "anchored_probe": "compare the read-back's findings; push again",
    "engine_answers": "see the engine's log; push everything again, or restart it",
    "engine_checksums": "do not use them here: parameters are packed away, their digests are of "
    "nothing; read weights back through the layers",
}
WARNINGS = frozenset({"engine_checksums"})


@dataclass
class SyncReport:
    """results by check name. ok None: had nothing to look at, which is never a pass."""

    engine: dict[str, Any]
    trainer: str
    receipt: PushReceipt
    results: dict[str, CheckResult] = field(default_factory=dict)
    read_back: WeightReport | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def failing(self) -> list[str]:
        return [name for name, result in self.results.items() if result.ok is False]

    @property
    def unobserved(self) -> list[str]:
        return [name for name, result in self.results.items() if result.ok is None]

    @property
    def cause(self) -> str:
        """One line; "" when no check fails."""
        return name_cause(self.results, self.read_back)

    @property
    def exit_code(self) -> int:
        """0 every check passed, 1 one failed, 3 one saw nothing."""
        if self.failing:
            return 1
        return 3 if self.unobserved or not self.results else 0

    def findings(self) -> list[dict[str, Any]]:
        """The read-back's findings, then those of the other checks."""
        found = [f.to_dict() for f in self.read_back.findings] if self.read_back else []
        for name, result in self.results.items():
            warns = name in WARNINGS
            if name not in CODES or (result.ok is not False and not warns):
                continue
            found.append(
                {
                    "code": CODES[name],
                    "cause": name,
                    "title": f"{TITLES[name]}: {result.detail}",
                    "severity": "warning" if warns else "error",
                    "remedy": REMEDIES[name],
                    "tensors": list(result.where),
                    "evidence": plain_json(dict(result.evidence)),
                }
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        checks = [plain_json({**asdict(r), "evidence": None}) for r in self.results.values()]
        for check in checks:
            check.pop("evidence")
        return {
            "schema_version": 1,
            "kind": "weight_sync",
            "exit_code": self.exit_code,
            "cause": self.cause,
            "trainer": self.trainer,
            "engine": plain_json({k: v for k, v in self.engine.items() if k != "config"}),
            "receipt": plain_json(asdict(self.receipt)),
            "checks": checks,
            "findings": self.findings(),
            "notes": self.notes,
            "read_back": self.read_back.to_dict() if self.read_back else None,
        }
