"""Faults put into a worker on purpose (see ``faults.py``): what a broken update would leave."""

from __future__ import annotations

from typing import Any

import torch


class FaultInjection:
    """Part of the worker extension. Nothing here runs unless a fault is asked for."""

    model_runner: Any

    def audit_weights_keep(self, layer: str) -> list[str]:
        """Fault injection: hold on to what a layer's kernel has now (see ``restore``)."""
        module = self.model_runner.get_model().get_submodule(layer)
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        self._audit_kept = [
            (owner, attribute, getattr(owner, attribute))
            for owner, attribute in (
                (module, "cpu_linear"), (kernel, "dnnl_handler"), (module, "cos_sin_cache")
            )
            if owner is not None and hasattr(owner, attribute)
        ]  # fmt: skip
        return [attribute for _, attribute, _ in self._audit_kept]

    def audit_weights_restore(self) -> int:
        """Fault injection: put the kept copies back, as an update that misses them would."""
        for owner, attribute, value in self._audit_kept:
            setattr(owner, attribute, value)
        return len(self._audit_kept)

    def audit_weights_zero(self, buffer: str) -> int:
        """Fault injection: zero every buffer of this name (``unzero`` puts them back)."""
        owners = [m for m in self.model_runner.get_model().modules() if hasattr(m, buffer)]
        self._audit_zeroed: list[tuple[torch.Tensor, torch.Tensor]] = [
            (getattr(owner, buffer), getattr(owner, buffer).clone()) for owner in owners
        ]
        for value, _ in self._audit_zeroed:
            value.zero_()
        return len(owners)

    def audit_weights_unzero(self) -> int:
        """Fault injection: the zeroed buffers as they were."""
        for value, kept in self._audit_zeroed:
            value.copy_(kept)
        return len(self._audit_zeroed)
