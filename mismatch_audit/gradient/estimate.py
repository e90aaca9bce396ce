"""The policy-gradient bias of a batch of rollouts, by slice and by correction, with intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernel_contracts.errors import InputError, UnsoundError
from kernel_contracts.estimators import WeightSummary, log_ratio, weight_summary
from kernel_contracts.verdict import BiasEstimate
from mismatch_audit.gradient.batch import Batch, Slices
from mismatch_audit.gradient.corrections import (
    NONE,
    SEQUENCE_WEIGHTS,
    TOKEN_WEIGHTS,
    Correction,
    standard_corrections,
)
from mismatch_audit.gradient.mean_vectors import FEWEST_PROMPTS, MeanVector
from mismatch_audit.gradient.relative import cosine_without_noise, relative_bias
from mismatch_audit.gradient.report import GradientReport, SliceBias
from mismatch_audit.programs.base import Sequence_

if TYPE_CHECKING:
    from mismatch_audit.programs.reference import TransformersReference

Array = npt.NDArray[np.float64]

__all__ = ["measure_gradient"]

FEWEST_EFFECTIVE = 8.0
"""Effective responses under full sequence weights below which their mean is a few responses'."""

_SAME_FORWARD = {"float64": 1e-6, "float32": 1e-2, "float16": 0.1, "bfloat16": 1.0}
"""Nats between the given reference log-probs and this forward's, by dtype: other batches round
otherwise, other weights or positions are off by far more."""


def measure_gradient(
    reference: TransformersReference,
    sequences: Sequence[Sequence_],
    engine_logprob: Mapping[str, npt.ArrayLike],
    reference_logprob: Mapping[str, npt.ArrayLike],
    advantages: Mapping[str, float],
    slices: Slices | None = None,
    *,
    prompt_of: Mapping[str, Hashable] | None = None,
    corrections: Sequence[Correction] | None = None,
    target: Correction = SEQUENCE_WEIGHTS,
    projection: int = 8192,
    seed: int = 0,
    alpha: float = 0.05,
    token_budget: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> GradientReport:
    """Measured bias of the engine's rollouts for the reference's policy gradient.

    engine_logprob, reference_logprob: sequence id -> ``[T]`` log-probs (nats) of its tokens,
    the engine's at the distribution that it sampled from.  advantages: sequence id -> A; without
    one, or with NaN, a sequence is left out and counted.  slices: name -> a set of prompt ids, or
    {sequence id: bool or ``[T]`` bool mask}; ``all`` and both signs of the advantage are added. A
    mask of tokens costs two more backward passes.  prompt_of: sequence id -> prompt (default: each
    its own); prompts are the unit of statistics.  target: what counts as the truth;
    ``TOKEN_WEIGHTS`` where responses are too long for full weights, with the bias that these leave.
    projection: width of the random projection.  alpha: of each two-sided interval.

    Raises InputError for log-probs that are missing, not finite or of another length, and for fewer
    than ``FEWEST_PROMPTS`` prompts; UnsoundError where this forward is not the one that gave
    ``reference_logprob``, or its gradient is not autograd's.
    """
    from mismatch_audit.gradient.parameter_space import response_gradients

    started = time.perf_counter()
    used = [s for s in sequences if s.n_response and _known(advantages.get(s.sequence_id))]
    delta = [_delta(s, engine_logprob, reference_logprob) for s in used]
    batch = Batch(
        used,
        delta,
        np.array([advantages[s.sequence_id] for s in used]),
        [s.sequence_id if prompt_of is None else prompt_of[s.sequence_id] for s in used],
        list(corrections if corrections is not None else standard_corrections()),
        target,
        dict(slices or {}),
    )
    if len(set(batch.prompts)) < FEWEST_PROMPTS:
        raise InputError(
            f"{len(set(batch.prompts))} prompts with a response and an advantage; a gradient needs "
            f"at least {FEWEST_PROMPTS}",
            fix="add prompts, or give more of them a reward",
        )
    found = response_gradients(
        reference,
        used,
        batch.coefficients(),
        width=projection,
        seed=seed,
        token_budget=token_budget,
        progress=None if progress is None else lambda done, n: progress("gradient", done, n),
    )
    worst = _check_forward(reference, used, found.logprob, reference_logprob)
    report = GradientReport(
        {},
        [],
        facts={
            "target": target.name,
            "projection": projection,
            "replicas": found.replicas,
            "seed": seed,
            "alpha": alpha,
            "parameters": found.parameters,
            "agreement_with_autograd": found.agreement,
            "logprob_difference": worst,
            "rms_score_norm": _rms(found.score_norm),
            "batches": found.batches,
        },
    )
    n_without = len(sequences) - len(used)
    if n_without:
        report.left_out["sequences"] = f"{n_without} without a response or an advantage"
    names = batch.slice_names()
    for done, name in enumerate(names):
        if progress is not None:
            progress("gradient statistics", done, len(names))
        _slice(report, batch, name, found.vectors, found.replicas, alpha, seed)
    report.facts["seconds"] = time.perf_counter() - started
    return report


def _slice(
    report: GradientReport,
    batch: Batch,
    name: str,
    vectors: list[npt.NDArray[np.float32]],
    replicas: int,
    alpha: float,
    seed: int,
) -> None:
    mine = batch.members(name)
    prompts = sorted({str(batch.prompts[i]) for i in mine})
    if len(prompts) < FEWEST_PROMPTS:
        report.left_out[name] = f"{len(prompts)} prompts, needs {FEWEST_PROMPTS}"
        return
    place = {prompt: row for row, prompt in enumerate(prompts)}
    rows = np.array([place[str(batch.prompts[i])] for i in mine])

    def per_prompt(correction: Correction) -> Array:
        """``[n, width]``: each prompt's responses summed, as a batch's loss sums them."""
        total = np.zeros((len(prompts), vectors[mine[0]].shape[1]))
        for i, row in zip(mine, rows, strict=True):
            which, scale = batch.use(name, correction, i)
            if which is not None:
                total[row] += scale * vectors[i][which]
        return total

    truth, plain = per_prompt(batch.target), per_prompt(NONE)
    n_tokens = batch.n_tokens(name)
    weights = {
        "sequence": weight_summary([float(batch.delta[i].sum()) for i in mine]),
        "token": weight_summary(np.concatenate([batch.delta[i] for i in mine])),
    }
    base, noise = _trace(plain), MeanVector.of(plain, replicas).size()
    why = _too_heavy(weights[batch.target.level])
    jobs: list[tuple[Correction, Correction, Array]]
    jobs = [(c, batch.target, truth) for c in batch.estimators(name) if c is not batch.target]
    if batch.target is not TOKEN_WEIGHTS:
        jobs.append((NONE, TOKEN_WEIGHTS, per_prompt(TOKEN_WEIGHTS)))
    if not truth.any():
        report.left_out[name] = "every advantage is 0"
        return
    means = {batch.target.name: MeanVector.of(truth, replicas)}
    for correction, against, gradient in jobs:
        x = plain if correction is NONE else per_prompt(correction)
        if against.name not in means:
            means[against.name] = MeanVector.of(gradient, replicas)
        difference = MeanVector.of(x - gradient, replicas)
        bias = relative_bias(difference, means[against.name], alpha=alpha, seed=seed)
        report.biases.append(
            SliceBias(
                slice=name,
                estimator=correction.name,
                target=against.name,
                bias=bias,
                noise=relative_bias(difference, noise, alpha=alpha, seed=seed),
                cosine=cosine_without_noise(x, gradient),
                variance=_trace(x) / base if base > 0 else math.nan,
                n_tokens=n_tokens,
                weights=weights[against.level],
                detail=why if against is batch.target else "",
            )
        )
        if correction is NONE and against is batch.target:
            _keep(report, report.biases[-1])


def _keep(report: GradientReport, one: SliceBias) -> None:
    """What contracts judge: both ratios of the estimator without weights."""
    how = f"U-statistic against {one.target}, test inversion"
    method = f"{how}; {one.detail}" if one.detail else how
    unknown = (0.0, math.inf)
    for kept, ratio in ((report.estimates, one.bias), (report.noise_estimates, one.noise)):
        lower, upper = unknown if one.detail else (ratio.lower, ratio.upper)
        kept[one.slice] = BiasEstimate(ratio.value, lower, upper, one.bias.n, one.n_tokens, method)


def _trace(x: Array) -> float:
    """Trace of the covariance of the prompts' vectors ``[n, d]``."""
    return float(((x - x.mean(0)) ** 2).sum()) / (len(x) - 1)


def _too_heavy(weights: WeightSummary) -> str:
    if weights.ess >= FEWEST_EFFECTIVE:
        return ""
    return (
        f"{weights.ess:.1f} effective responses of {weights.n} (largest share "
        f"{weights.max_share:.0%}): no interval; measure against token weights"
    )


def _known(advantage: float | None) -> bool:
    return advantage is not None and math.isfinite(advantage)


def _delta(
    sequence: Sequence_, engine: Mapping[str, npt.ArrayLike], reference: Mapping[str, npt.ArrayLike]
) -> Array:
    name = sequence.sequence_id
    for side, logprob in (("engine", engine), ("reference", reference)):
        if name not in logprob:
            raise InputError(f"no {side} log-probs for {name!r}")
        values = np.asarray(logprob[name], dtype=np.float64)
        if values.shape != (sequence.n_response,) or not np.isfinite(values).all():
            raise InputError(
                f"the {side} log-probs of {name!r} must be {sequence.n_response} finite numbers",
                fix="leave the response out, and see clause `nonfinite` for why it is so",
            )
    return np.asarray(log_ratio(engine[name], reference[name]))


def _check_forward(
    reference: TransformersReference,
    sequences: list[Sequence_],
    logprob: list[Array],
    given: Mapping[str, npt.ArrayLike],
) -> float:
    """Largest |this forward's log-prob - the given one|."""
    dtype = str(reference.head().weight.dtype).removeprefix("torch.")
    names = [s.sequence_id for s, mine in zip(sequences, logprob, strict=True) if len(mine)]
    errors = np.array(
        [
            np.abs(mine - np.asarray(given[s.sequence_id], np.float64)).max()
            for s, mine in zip(sequences, logprob, strict=True)
            if len(mine)
        ]
    )
    if not errors.size:
        return 0.0
    worst, where = float(errors.max()), names[int(errors.argmax())]  # of NaN, NaN
    limit = _SAME_FORWARD.get(dtype, 1e-2)
    if not worst <= limit:
        raise UnsoundError(
            f"the log-probs of {where!r} differ from the reference's own by {worst:.3g} nats "
            f"(batching explains {limit:g})",
            where="gradient",
            fix="pass the log-probs that this reference gave, with its weights",
        )
    return worst


def _rms(norms: list[Array]) -> float:
    values = np.concatenate(norms) if norms else np.zeros(0)
    return float(np.sqrt(np.mean(values**2))) if values.size else math.nan
