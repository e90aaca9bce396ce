"""The reference: transformers, teacher-forced, in the training kernel's own forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_contracts.errors import InputError, UnsoundError
from mismatch_audit.programs.base import ScoredSequence, Sequence_
from mismatch_audit.programs.batching import pad_batch, token_budget_batches
from mismatch_audit.settings import ReferenceSettings

if TYPE_CHECKING:
    import torch

    from mismatch_audit.compare.heads import Head

# Head dtype -> the largest |head(hidden) - model's own logits| that rounding explains, as a share
# of the largest logit. Beyond it the model does something after its head that we do not know.
_HEAD_TOLERANCE = {"torch.float32": 1e-5, "torch.bfloat16": 2**-7, "torch.float16": 2**-10}


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``. Raises InputError for anything but a float dtype."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"unknown dtype {name!r}", fix="use float32, bfloat16, float16 or float64")
    return dtype


def load_causal_lm(model: str, *, dtype: str, device: str, attn: str, trust: bool = False) -> Any:
    """A causal LM by the ordinary ``from_pretrained``; one clear error when it is not there."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # Our own progress is on the same terminal.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch_dtype(dtype), attn_implementation=attn, trust_remote_code=trust
        )
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"transformers cannot load {model!r}: {first}",
            fix="give a checkpoint directory, a hub id that this machine can reach, or `sample`",
        ) from error
    return loaded.to(device).eval()


class TransformersReference:
    """Scores sequences with transformers; hidden states of the response rows stay in memory.

    Raises UnsoundError when the model's logits are not ``head(hidden)`` beyond rounding.
    """

    def __init__(
        self, model_path: str, settings: ReferenceSettings, *, trust: bool = False
    ) -> None:
        import torch

        self.settings = settings
        self.device = settings.device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_causal_lm(
            model_path,
            dtype=settings.dtype,
            device=self.device,
            attn=settings.attn_implementation,
            trust=trust,
        )
        self.path = Path(model_path)
        config = self.model.config
        eos = config.eos_token_id
        self.pad_id = config.pad_token_id
        if self.pad_id is None:
            self.pad_id = (eos[0] if isinstance(eos, list) else eos) or 0
        self._head = self._read_head()
        self._head_error: float | None = None

    def _read_head(self) -> Head:
        from mismatch_audit.compare.heads import Head

        config, layer = self.model.config, self.model.get_output_embeddings()
        scale = 1.0
        if getattr(config, "logit_scale", None):  # Cohere multiplies
            scale = float(config.logit_scale)
        elif getattr(config, "logits_scaling", None):  # Granite divides
            scale = 1.0 / float(config.logits_scaling)
        return Head(
            weight=layer.weight.detach(),
            bias=None if getattr(layer, "bias", None) is None else layer.bias.detach(),
            scale=scale,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def head(self) -> Head:
        """The head that turns this program's hidden states into logits."""
        return self._head

    def facts(self) -> dict[str, Any]:
        """What this program is, read back from the loaded model."""
        import torch
        import transformers

        return {
            "program": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "head_dtype": str(self._head.weight.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "device": self.device,
            "padding": self.settings.padding,
            "token_budget": self.settings.token_budget,
            "vocab_size": int(self._head.weight.shape[0]),
            "head_check": self._head_error,
        }

    def score(
        self, sequences: Sequence[Sequence_], *, token_budget: int | None = None
    ) -> Iterable[ScoredSequence]:
        """One ScoredSequence an input, in micro-batch order (not input order)."""
        budget = token_budget or self.settings.token_budget
        for batch in token_budget_batches([len(s.token_ids) for s in sequences], budget):
            yield from self._score_batch([sequences[i] for i in batch])

    def _score_batch(self, batch: list[Sequence_]) -> Iterator[ScoredSequence]:
        import torch

        padding = self.settings.padding
        ids, mask, positions = pad_batch(
            [s.token_ids for s in batch], self.pad_id, padding, self.device
        )
        padded = bool((mask == 0).any())
        with torch.no_grad():
            out = self.model.base_model(
                input_ids=ids,
                # Without a mask transformers takes the causal fast path; equal lengths need none.
                attention_mask=mask if padded else None,
                position_ids=positions,
                use_cache=False,
            )
        hidden = out.last_hidden_state
        if self._head_error is None:
            self._check_head(ids[:1], mask[:1], positions[:1], hidden[:1])
        for i, sequence in enumerate(batch):
            at = 0 if padding == "right" else ids.shape[1] - len(sequence.token_ids)
            start = at + sequence.prompt_length - 1
            yield ScoredSequence(
                sequence.sequence_id, hidden[i, start : start + sequence.n_response].clone()
            )

    def _check_head(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """The model's own logits against ours on the first sequence, once a run."""
        import torch

        with torch.no_grad():
            own = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
            ).logits[0][mask[0].bool()]
        ours = self._head.logits(hidden[0][mask[0].bool()])
        scale = float(own.float().abs().max()) or 1.0
        self._head_error = float((own.float() - ours.float()).abs().max()) / scale
        limit = _HEAD_TOLERANCE.get(str(self._head.weight.dtype), 1e-5)
        if not self._head_error <= limit:
            raise UnsoundError(
                f"the reference's logits differ from head(hidden) by {self._head_error:.2e} of "
                f"their size (rounding explains {limit:.0e})",
                where=f"reference {self.path}",
                fix="the architecture post-processes its logits; report its config so that "
                "the head can be described",
            )

    def close(self) -> None:
        """Free the weights."""
        del self.model
