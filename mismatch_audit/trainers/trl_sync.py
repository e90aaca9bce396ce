"""A trainer's weight sync, watched: held back, read back, or guarded with a way back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_contracts.errors import InputError
from mismatch_audit.reports.rows import Finding
from mismatch_audit.trainers.monitor import Monitor
from mismatch_audit.trainers.trl_engine import ColocatedEngine, TrainedModel

log = logging.getLogger("mismatch_audit.trainers")


class WatchedSync:
    """Wraps ``trainer.vllm_generation.sync_weights`` on the instance.

    hold: the next sync does not happen, and says so. served_version: the trainer's step whose
    weights the engine was given last, as far as the sync claims. canaries: token sequences to check
    a guarded push by. weights: read back at every so many syncs (0: never).
    """

    def __init__(
        self, trainer: Any, monitor: Monitor, *, weights: int = 0, guard: Path | None = None
    ) -> None:
        self.trainer, self.monitor, self.weights, self.guard = trainer, monitor, weights, guard
        self.generation = trainer.vllm_generation
        self.hold, self.syncs, self.held, self.rolled_back = False, 0, 0, 0
        last = int(trainer._last_loaded_step)
        self.served_version: int | None = last if last >= 0 else None
        self.canaries: Sequence[Sequence[int]] = []
        self._metrics: dict[str, float] = {}
        self._served: Any = None
        self._audit: Any = self._sync_audit() if weights else None
        if guard is not None:
            self._check_guard()
        self._replaced = self.generation.__dict__.get("sync_weights")
        self._original = self.generation.sync_weights
        self.generation.sync_weights = self.sync

    def detach(self) -> None:
        """The generation's own sync again."""
        if self._replaced is None:
            del self.generation.sync_weights
        else:
            self.generation.sync_weights = self._replaced

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call, for the trainer's log."""
        found, self._metrics = self._metrics, {}
        return {"mismatch/pushes_held": float(self.held), **found}

    def record_step(self, step: int) -> None:
        """After an optimiser step: remember the master, to tell how old served weights are."""
        if self._audit is not None:
            self._audit.record(self.generation._iter_named_params(), step)

    def sync(self) -> None:
        """What the trainer calls."""
        step = int(self.trainer.state.global_step)
        if self.hold and not self._sleeping():
            self.held += 1
            log.warning(
                "mismatch-audit: the weight push of step %d is held back; the engine keeps serving "
                "step %s",
                step,
                self.served_version,
            )
            return
        if self.guard is not None and step != self.served_version:
            if self._served is None or not self.canaries:
                self._first_guarded(step)
            else:
                self._guarded(step)
        else:
            self._original()
            self.served_version = step
        self.syncs += 1
        if self._audit is not None and self.syncs % self.weights == 0:
            self._read_back(step)

    def _sleeping(self) -> bool:
        """Sleep level 2 has thrown the weights away: a push cannot be held then."""
        return bool(getattr(self.generation, "_llm_weights_sleeping", False))

    # Reading back --------------------------------------------------------------------------------
    def _sync_audit(self) -> Any:
        from mismatch_audit.weights.hooks import SyncAudit

        if hasattr(self.trainer.model, "peft_config"):
            raise InputError(
                "an adapter's weights cannot be read back from here", where="weights",
                fix="leave `weights` out: naming the merged weights would merge and unmerge the "
                "adapter once more a step, which is not exact in bf16",
            )  # fmt: skip
        engine = ColocatedEngine(self.generation)
        audit = SyncAudit(
            engine.read_served,
            dtype=engine.facts()["dtype"],
            config=self.trainer.model.config.to_dict(),
        )
        audit.record(self.generation._iter_named_params(), int(self.trainer.state.global_step))
        return audit

    def _read_back(self, step: int) -> None:
        try:
            found = self._audit.check(
                self.generation._iter_named_params(), step, version=self.served_version
            )
        except Exception as error:
            if self.monitor.strict:
                raise
            log.warning(
                "mismatch-audit: the weights of step %d were not read back: %s", step, error
            )
            self._metrics["weights/unobserved"] = 1.0
            return
        self._metrics |= found.scalars()
        if found.ok is False:
            self.monitor.add_finding(_weights_finding(found))

    # With a way back -----------------------------------------------------------------------------
    def _check_guard(self) -> None:
        if self.trainer.accelerator.num_processes > 1:
            raise InputError(
                "a guarded sync works in one process only", where="guard",
                fix="leave `guard` out, or guard the deployment with `audit gate`",
            )  # fmt: skip
        ColocatedEngine(self.generation)

    def _first_guarded(self, step: int) -> None:
        """Nothing to check a first push by yet, and nothing to go back to: from the next on."""
        from mismatch_audit.gate import Served

        assert self.guard is not None
        self._original()
        folder = self.guard / f"version-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        self._served = Served(TrainedModel(self.trainer.model).export(folder), step)
        self.served_version = step
        self._metrics["weights/guarded"] = 0.0

    def _guarded(self, step: int) -> None:
        """Raises RollbackError where the engine serves neither the new weights nor the old ones:
        training on must not go unnoticed then."""
        from mismatch_audit.gate import guarded_sync

        assert self.guard is not None
        engine = ColocatedEngine(self.generation, self._original)
        engine.version = self._served.version
        outcome = guarded_sync(
            TrainedModel(self.trainer.model), engine, version=step, previous=self._served,
            sequences=self.canaries, folder=self.guard, contract=self.monitor.contract,
        )  # fmt: skip
        self._served = outcome.served
        self.served_version = outcome.served.version
        self._metrics |= {"weights/guarded": 1.0, "weights/push_ok": float(outcome.ok)}
        self._metrics |= {
            f"weights/check/{c.check}": c.value for c in outcome.checks if c.value is not None
        }
        if not outcome.ok:
            self.rolled_back += 1
            log.warning("mismatch-audit: the push of step %d was rolled back: %s", step,
                        "; ".join(outcome.reasons))  # fmt: skip
            self.monitor.add_finding(
                Finding(
                    code="PUSH_ROLLED_BACK",
                    title="A weight push failed its checks and was rolled back",
                    severity="error",
                    evidence=[{"step": step, "serves": self.served_version,
                               "reasons": "; ".join(outcome.reasons)}],
                    remedy="mend the sync; the engine keeps serving the last weights that passed",
                )
            )  # fmt: skip


def _weights_finding(found: Any) -> Finding:
    """A failed read-back as a cause: what is stale, and since when."""
    evidence = {
        "step": found.step,
        "unequal_tensors": len(found.unequal),
        "first": ", ".join(found.unequal[:8]),
        "gain": round(found.gain, 4),
        "causes": "; ".join(found.findings),
    }
    lag = found.stale_after_step
    if lag:
        evidence["serves_step"] = found.step - lag
        return Finding(
            code="STALE_WEIGHTS",
            title=f"The engine serves the weights of step {found.step - lag}, not of {found.step}",
            severity="error",
            evidence=[evidence],
            remedy="the sync ran without changing what is served: check that it reaches the live "
            "model, and that nothing reloads the checkpoint after it",
        )
    return Finding(
        code="SERVED_WEIGHTS_DIFFER",
        title="Served tensors are not the cast of the trainer's: " + ", ".join(found.unequal[:4]),
        severity="error",
        evidence=[evidence],
        remedy="these tensors did not arrive with the sync: compare the names that the trainer "
        "sends with those that the engine loads (`audit weights`)",
    )
