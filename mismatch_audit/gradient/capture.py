"""Per-response gradients of a batched backward pass, projected as they arise.

Hooks keep the projected input of each layer (64 floats a token) and, when the gradient of its
output comes by, add the product to the response that the token belongs to. No weight's gradient is
formed, and a backward pass through activations only costs half of an ordinary one.

Covered so: linear layers, embeddings, norms. Whatever else has parameters (fused experts, for one)
gets ordinary gradients, which belong to one response only if it is alone in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernel_contracts.errors import InputError
from mismatch_audit.gradient.projection import REPLICAS, SIDE, Projection

__all__ = ["Capture"]

Add = Callable[[torch.Tensor], None]


class Capture:
    """Hooks on a causal LM. ``total [B, width]``: what the running backward pass adds to.

    Parameters that do not require a gradient (a frozen base under adapters) are left out. ``alone``
    is True where the model has parameters that force one response a batch.
    """

    def __init__(self, model: Any, projection: Projection) -> None:
        self.model, self.projection = model, projection
        self.total = torch.empty(0)
        self.names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self.head = model.get_output_embeddings()
        self.others: dict[str, torch.nn.Parameter] = {}
        self._hooked: list[tuple[torch.nn.Module, Callable[..., None]]] = []
        self._embeddings: list[tuple[torch.Tensor, Add | None]] = []
        self._batch = 0
        self._inside = False
        for module in model.modules():
            if module is not self.head:
                self._plan(module)
        if not self.names:
            raise InputError("no parameter of the reference requires a gradient")

    @property
    def alone(self) -> bool:
        return bool(self.others)

    def name_of(self, parameter: torch.Tensor | None) -> str | None:
        """The parameter's name if its gradient is wanted. Tied parameters share one."""
        return None if parameter is None else self.names.get(id(parameter))

    def _plan(self, module: torch.nn.Module) -> None:
        own = [p for p in module.parameters(recurse=False) if id(p) in self.names]
        if isinstance(module, torch.nn.Embedding):
            self._hooked.append((module, self._on_embedding))
        elif not own:
            return
        elif isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
            self._hooked.append((module, self._on_linear))
        elif "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in own):
            self._hooked.append((module, self._on_norm))
        else:
            self.others |= {self.names[id(p)]: p for p in own}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks on and parameters frozen, but for ``others``; everything as before afterwards."""
        before = [(p, p.requires_grad) for p in self.model.parameters()]
        handles = []
        try:
            for parameter, _ in before:
                parameter.requires_grad_(False)
            for parameter in self.others.values():
                parameter.requires_grad_(True)
            handles = [module.register_forward_hook(hook) for module, hook in self._hooked]
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, required in before:
                parameter.requires_grad_(required)
            self._embeddings.clear()

    def start(self, batch: int) -> None:
        """Forget the last batch; the next forward pass has ``batch`` responses."""
        self._batch = batch
        self._embeddings.clear()

    def backward(
        self, hidden: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor, *, keep: bool
    ) -> None:
        """Add to ``total [B, width]`` all that ``gradient`` of ``hidden`` gives; keep the graph?"""
        self.total = total
        leaves = [leaf for leaf, _ in self._embeddings]
        found = torch.autograd.grad(
            hidden,
            [*leaves, *self.others.values()],
            gradient,
            retain_graph=keep,
            allow_unused=True,
        )
        for (_, add), one in zip(self._embeddings, found, strict=False):
            if add is not None and one is not None:
                add(one)
        for (name, _), one in zip(self.others.items(), found[len(leaves) :], strict=True):
            if one is not None:
                self.projection.add_tensor(total[0], name, one)

    def add_products(self, name: str, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """sum over tokens of rows x columns, each ``[B, T, REPLICAS * SIDE]``."""
        batch, steps, _ = rows.shape
        left = rows.view(batch, steps, REPLICAS, SIDE).permute(0, 2, 3, 1)
        right = columns.view(batch, steps, REPLICAS, SIDE).permute(0, 2, 1, 3)
        self.projection.add_matrix(self.total, name, left @ right)

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, T, n]`` float32 of whatever lies between."""
        if x.shape[0] != self._batch and self._batch > 1:
            raise InputError(
                f"a layer sees {tuple(x.shape)}, which cannot be told apart into {self._batch} "
                "responses",
                fix="measure the gradient with one response a batch (alone=True)",
            )
        return x.detach().reshape(self._batch, -1, x.shape[-1]).float()

    def _on_linear(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if not output.requires_grad:
            return
        name, bias = self.name_of(module.weight), self.name_of(module.bias)  # type: ignore[arg-type]
        # Conv1D keeps its weight as [in, out].
        into, out_of = ("columns", "rows")
        if not isinstance(module, torch.nn.Linear):
            into, out_of = out_of, into
        x, projection = self._tokens(args[0]), self.projection
        inputs = x @ projection.side(name, into, x.shape[-1]) if name else None

        def add(gradient: torch.Tensor) -> None:
            y = self._tokens(gradient)
            if name and inputs is not None:
                outputs = y @ projection.side(name, out_of, y.shape[-1])
                pair = (outputs, inputs) if out_of == "rows" else (inputs, outputs)
                self.add_products(name, *pair)
            if bias:
                projection.add_vector(self.total, bias, y.sum(1))

        output.register_hook(add)  # type: ignore[no-untyped-call]

    def _on_norm(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        """A norm is affine in its weight, so f(x; 1) - f(x; 0) is what the weight multiplies."""
        if self._inside or not output.requires_grad:
            return
        x = args[0].detach()

        def add(gradient: torch.Tensor) -> None:
            y = self._tokens(gradient)
            for label, parameter in module.named_parameters(recurse=False):
                name = self.name_of(parameter)
                if name is None:
                    continue
                ends = [self._norm_with(module, label, value, x) for value in (1.0, 0.0)]
                factor = self._tokens(ends[0]) - self._tokens(ends[1])
                self.projection.add_vector(self.total, name, (y * factor).sum(1))

        output.register_hook(add)  # type: ignore[no-untyped-call]

    def _norm_with(
        self, module: torch.nn.Module, label: str, value: float, x: torch.Tensor
    ) -> torch.Tensor:
        self._inside = True
        try:
            with torch.no_grad():
                parameter = torch.full_like(getattr(module, label), value)
                out: torch.Tensor = torch.func.functional_call(module, {label: parameter}, (x,))
                return out
        finally:
            self._inside = False

    def _on_embedding(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        name, ids = self.name_of(module.weight), args[0]  # type: ignore[arg-type]
        if not output.requires_grad:
            output.requires_grad_(True)
        if name is None:
            self._embeddings.append((output, None))
            return
        scale = getattr(module, "embed_scale", 1.0)
        padding = module.padding_idx

        def add(gradient: torch.Tensor) -> None:
            y = self._tokens(gradient * scale)
            if padding is not None:  # torch gives the padding token's row no gradient
                y = y * (ids != padding).reshape(*y.shape[:2], 1)
            rows = self.projection.side(name, "rows", int(module.weight.shape[0]))[ids]  # type: ignore[index]
            columns = y @ self.projection.side(name, "columns", y.shape[-1])
            self.add_products(name, rows.view(*columns.shape), columns)

        self._embeddings.append((output, add))
