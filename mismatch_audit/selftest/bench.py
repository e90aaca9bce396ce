"""Clean rows once, then a token table per fault: the reference against its faulted self.

Contexts are texts that the clean model sampled; on each of them the token to score is drawn from
the *faulted* distribution, so that estimates from sampled tokens (k3, weights) mean what they mean
in a run. What compounds along a faulted rollout is not seen: each row's context is clean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from kernel_contracts.errors import InputError
from kernel_contracts.selftest import Injection, OrdinaryCheck
from kernel_contracts.verdict import Evidence
from mismatch_audit.compare import compare_logits
from mismatch_audit.programs.base import Sequence_
from mismatch_audit.programs.batching import pad_batch, token_budget_batches
from mismatch_audit.prompts import EncodedPrompt
from mismatch_audit.selftest.faults import Fault
from mismatch_audit.tokens import COMPARED

if TYPE_CHECKING:
    from mismatch_audit.programs.reference import TransformersReference

ROWS = 128
"""Rows of logits at a time: 25 MB a side for a vocabulary of 49,152."""

SUM_TOLERANCE = 2e-2
"""What a test of bf16 results allows (the relative tolerance of torch.testing is 1.6e-2)."""

TOP1_SHARE = 0.5
NOISE = "noise"
PERPLEXITY_FACTOR = 2.0


@dataclass
class _Seen:
    """What ordinary checks ask about, summed over rows."""

    nonfinite: int = 0
    sum_error: float = 0.0
    agree: int = 0
    nll: float = 0.0
    rows: int = 0


class Bench:
    """The clean model with its texts and rows.

    sequences: one a prompt, sampled by the clean model.  hidden: ``[rows, H]`` clean rows.
    """

    def __init__(
        self,
        reference: TransformersReference,
        prompts: Sequence[EncodedPrompt],
        *,
        max_tokens: int,
        seed: int = 0,
    ) -> None:
        self.reference = reference
        self.seed = seed
        self.max_tokens = max_tokens
        self.metadata = pd.DataFrame([{"prompt_id": p.id, **p.metadata} for p in prompts])
        self.sequences = sample_texts(reference, prompts, max_tokens, seed)
        self.hidden = self._score(self.sequences)
        self.spoken = torch.tensor([t for s in self.sequences for t in s.response])
        self.lengths = [s.n_response for s in self.sequences]

    def _score(self, sequences: Sequence[Sequence_], budget: int | None = None) -> torch.Tensor:
        found = {
            s.sequence_id: s.hidden for s in self.reference.score(sequences, token_budget=budget)
        }
        return torch.cat([found[s.sequence_id] for s in sequences])

    def control(self) -> Evidence:
        """The reference against itself: other micro-batches, padded on the other side.

        With the same padding a CPU gives the very same bits, and the control would show nothing.
        """
        own = self.reference.settings
        padding = "left" if own.padding == "right" else "right"
        try:
            self.reference.settings = own.model_copy(update={"padding": padding})
            rows = self._score(self.sequences, max(1, own.token_budget // 4))
        finally:
            self.reference.settings = own
        return self._evidence(self._frame(Fault("control", ""), rows)[0])

    def inject(self, fault: Fault) -> Injection:
        """The faulted program against the clean one, and what ordinary checks say of it."""
        frame, seen = self._frame(fault, self._faulted(fault))
        return Injection(
            fault.name, fault.meaning, fault.moves, self._evidence(frame), self._checks(seen)
        )

    def noise(self, size: float) -> Evidence:
        """Independent Gaussian noise of ``size`` nats on every logit: the scalable fault."""
        generator = torch.Generator(self.hidden.device).manual_seed(self.seed + 1)

        def noisy(z: torch.Tensor) -> torch.Tensor:
            noise = torch.empty_like(z).normal_(generator=generator)
            return z.add_(noise, alpha=size)

        return self._evidence(self._frame(Fault(NOISE, "", logits=noisy), self.hidden)[0])

    def _faulted(self, fault: Fault) -> torch.Tensor:
        if not fault.needs_forward:
            return self.hidden
        sequences = self.sequences
        if fault.prompt is not None:
            bos = self.reference.model.config.bos_token_id
            if bos is None:
                raise InputError(
                    f"the model has no BOS token: the fault {fault.name} does not apply to it",
                    fix="name the faults to inject with --fault",
                )
            sequences = [fault.prompt(s, int(bos)) for s in sequences]
        if fault.model is None:
            return self._score(sequences)
        with fault.model(self.reference.model):
            return self._score(sequences)

    def _frame(self, fault: Fault, rows: torch.Tensor) -> tuple[pd.DataFrame, _Seen]:
        """Token rows of the decode path."""
        head, seen = self.reference.head(), _Seen()
        generator = torch.Generator(rows.device).manual_seed(self.seed)
        parts: list[dict[str, Any]] = []
        for at in range(0, len(rows), ROWS):
            clean = head.logits(self.hidden[at : at + ROWS]).float()
            same = rows is self.hidden  # then the head, half of the cost, is not needed again
            given = clean.clone() if same else head.logits(rows[at : at + ROWS]).float()
            if fault.logits is not None:
                given = fault.logits(given)
            parts.append(self._chunk(fault, clean, given, at, generator, seen))
        columns = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        logprob = columns["engine_logprob"]
        if fault.unnormalised:
            logprob = columns["given"]
        if fault.reported is not None:
            logprob = fault.reported(logprob, columns["log_mass"], self.lengths)
        columns["engine_logprob"] = logprob
        seen.nonfinite += int((~logprob.isfinite()).sum())
        tokens = columns.pop("token_id").numpy()
        kept = {name: columns[name].numpy() for name in COMPARED}
        frame = self._identity(tokens).assign(**kept, engine_reported_logprob=logprob.numpy())
        return frame, seen

    def _chunk(
        self,
        fault: Fault,
        clean: torch.Tensor,
        given: torch.Tensor,
        at: int,
        generator: torch.Generator,
        seen: _Seen,
    ) -> dict[str, torch.Tensor]:
        probabilities = given.softmax(-1)
        log_mass = torch.zeros(len(given), dtype=torch.float64)
        if fault.support is not None:
            probabilities = probabilities * fault.support(given)
            log_mass = probabilities.double().sum(-1).log()
        # An exponential race: one draw a row, in a third of multinomial's time. A row with NaN
        # (counted below) draws whatever argmax makes of it.
        race = torch.empty_like(probabilities).exponential_(generator=generator)
        ids = probabilities.div_(race).argmax(-1)
        columns = compare_logits(clean, given, ids)
        columns["given"] = given.gather(1, ids[:, None])[:, 0].double()
        columns["token_id"], columns["log_mass"] = ids, log_mass
        seen.agree += int((columns["reference_top1"] == columns["engine_top1"]).sum())
        seen.rows += len(ids)
        if fault.unnormalised:
            seen.sum_error = max(seen.sum_error, float((given.logsumexp(-1).exp() - 1).abs().max()))
        if fault.name != NOISE:  # float32 will do: these are functional tests, not metrics
            seen.nonfinite += int((~given.isfinite()).sum())
            spoken = self.spoken[at : at + ROWS, None]
            seen.nll += float((_log_prob(clean, spoken) - _log_prob(given, spoken)).sum())
        return columns

    def _checks(self, seen: _Seen) -> tuple[OrdinaryCheck, ...]:
        agree, factor = seen.agree / seen.rows, float(np.exp(seen.nll / seen.rows))
        return (
            OrdinaryCheck("non-finite", seen.nonfinite, "0", seen.nonfinite == 0),
            OrdinaryCheck(
                "sum of probabilities off by", seen.sum_error, f"<= {SUM_TOLERANCE:g}",
                seen.sum_error <= SUM_TOLERANCE,
            ),
            OrdinaryCheck(
                "same greedy token", agree, f">= {TOP1_SHARE:g}", agree >= TOP1_SHARE
            ),
            OrdinaryCheck(
                "perplexity of the clean text, factor", factor, f"<= {PERPLEXITY_FACTOR:g}",
                factor <= PERPLEXITY_FACTOR,
            ),
        )  # fmt: skip

    def _identity(self, tokens: np.ndarray[Any, Any]) -> pd.DataFrame:
        names = np.repeat([s.sequence_id for s in self.sequences], self.lengths)
        position = np.concatenate([np.arange(n) for n in self.lengths])
        start = np.repeat([s.prompt_length for s in self.sequences], self.lengths)
        return pd.DataFrame(
            {
                "prompt_id": names,
                "sequence_id": names,
                "position": position,
                "context_length": start + position,
                "token_id": tokens,
                "path": "decode",
                "weights_version": 0,
                "trainer_version": 0,
                "kl_method": "full",
                "n_cached_tokens": 0,
                "batch_rows": len(self.sequences),
                "loss_mask": True,
            }
        )

    def _evidence(self, frame: pd.DataFrame) -> Evidence:
        return Evidence(tokens=frame, prompts=self.metadata, max_rows=self.max_tokens)


def _log_prob(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens ``[T, 1]`` under logits ``[T, V]``."""
    return logits.gather(1, ids)[:, 0] - logits.logsumexp(-1)


def sample_texts(
    reference: TransformersReference,
    prompts: Sequence[EncodedPrompt],
    max_tokens: int,
    seed: int,
) -> list[Sequence_]:
    """One response a prompt, sampled by the clean model at temperature 1, ended by its EOS."""
    model, pad = reference.model, reference.pad_id
    ends = model.generation_config.eos_token_id or model.config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    found: dict[str, Sequence_] = {}
    lengths = [p.n_prompt_tokens for p in prompts]
    for batch in token_budget_batches(lengths, reference.settings.token_budget):
        rows = [prompts[i] for i in batch]
        ids, mask, _ = pad_batch([p.token_ids for p in rows], pad, "left", reference.device)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed + len(found))
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=True,
                temperature=1.0, top_p=1.0, top_k=0, pad_token_id=pad,
            )  # fmt: skip
        for prompt, response in zip(rows, out[:, ids.shape[1] :].tolist(), strict=True):
            end = next((i + 1 for i, t in enumerate(response) if t in stops), len(response))
            found[prompt.id] = Sequence_(
                prompt.id, (*prompt.token_ids, *response[:end]), prompt.n_prompt_tokens
            )
    return [found[p.id] for p in prompts]


def short_prompts(
    prompts: Sequence[EncodedPrompt], most: int, limit: int
) -> tuple[list[EncodedPrompt], int]:
    """(at most ``limit`` prompts of at most ``most`` tokens, spread over domains, shortest first
    within each; how many were too long)."""
    from mismatch_audit.prompts import Prompt, spread

    fits = sorted(
        (p for p in prompts if p.n_prompt_tokens <= most), key=lambda p: (p.n_prompt_tokens, p.id)
    )
    by_id = {p.id: p for p in fits}
    order = spread([Prompt(id=p.id, metadata=dict(p.metadata)) for p in fits], limit)
    return [by_id[p.id] for p in order], len(prompts) - len(fits)
