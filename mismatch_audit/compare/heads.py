"""Heads: from final hidden states to logits, as the program that owns the head computes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.compare.capabilities import loads

if TYPE_CHECKING:
    from mismatch_audit.compare.rounded_matmul import RoundedMatmul


@dataclass(frozen=True)
class Head:
    """The last layer of a program, in the program's own dtype and on its own device.

    weight: ``[V, H]``, any float dtype; logits come out in this dtype.  bias: ``[V]`` or None.
    softcap: ``softcap * tanh(logits / softcap)`` (Gemma 2), applied before ``scale`` as vLLM does.
    scale: factor on the logits (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``).
    Raises InputError where the shapes or dtypes do not fit.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.is_floating_point():
            raise InputError(
                f"a head needs a float weight [V, H], got {self.weight.dtype} "
                f"{tuple(self.weight.shape)}"
            )
        if self.bias is not None and tuple(self.bias.shape) != (self.vocab_size,):
            raise InputError(
                f"the head's bias is {tuple(self.bias.shape)}, its vocabulary {self.vocab_size}"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise InputError(f"softcap must be positive, got {self.softcap}")

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def workspace_bytes(self) -> int:
        """Memory that ``logits`` needs beside its result."""
        return 0 if self._rounded is None else self._rounded.workspace_bytes

    @cached_property
    def _rounded(self) -> RoundedMatmul | None:
        """A faster route to the same bits, where torch has none for this head."""
        if not loads("numba"):
            return None
        from mismatch_audit.compare import rounded_matmul

        if not rounded_matmul.applies(self.weight, self.bias):
            return None
        return rounded_matmul.RoundedMatmul(self.weight)

    def logits(
        self,
        hidden: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        """``[T, H]`` -> logits ``[T, stop - start]`` of the tokens ``start..stop``, head's dtype.

        out: a contiguous buffer of that shape and dtype to write to (the same numbers, bit for
        bit, as without it: ``mm(out=)`` and ``linear`` run the same kernel).
        """
        if hidden.ndim != 2 or hidden.shape[1] != self.width:
            raise InputError(
                f"hidden states are {tuple(hidden.shape)}, the head takes [T, {self.width}]"
            )
        weight = self.weight[start:stop]
        bias = None if self.bias is None else self.bias[start:stop].to(weight.dtype)
        rows = hidden.to(device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            rounded = self._rounded if len(weight) == self.vocab_size else None
            if rounded is not None:
                logits = rounded(rows, out)
            elif out is None:
                logits = torch.nn.functional.linear(rows, weight, bias)
            elif bias is None:
                logits = torch.mm(rows, weight.t(), out=out)
            else:
                logits = torch.addmm(bias, rows, weight.t(), out=out)
            if self.softcap is not None:
                logits.div_(self.softcap).tanh_().mul_(self.softcap)
            if self.scale != 1.0:
                logits.mul_(self.scale)
        return logits
