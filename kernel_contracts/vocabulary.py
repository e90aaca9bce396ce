"""The words that a contract may use: metrics, verdicts, actions, probes, token-table columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

NumericalMetric = Literal[
    "drift",
    "abs_dlp",
    "kl_engine_reference",
    "kl_reference_engine",
    "tv",
    "chi2",
    "tail_mass",
    "nonfinite",
]
StatisticalMetric = Literal[
    "kl_engine_reference",
    "kl_reference_engine",
    "tv",
    "chi2",
    "drift",
    "abs_dlp",
    "flip_rate",
    "k3",
    "mult_prob_error",
    "abs_dp",
    "policy_gradient_bias",
    "policy_gradient_bias_to_noise",
    "ess_ratio",
    "tail_mass",
]
RuntimeMetric = Literal["kl", "abs_dlp", "flip_rate"]
Probe = Literal["prefill_decode", "batch_invariance", "order", "repetition"]
Path = Literal["decode", "prefill", "both"]
Weight = Literal["prompt", "token"]
VerdictWord = Literal["PASS", "WARN", "FAIL", "INCONCLUSIVE", "UNOBSERVED", "UNSOUND"]
Action = Literal[
    "log",
    "sample_more",
    "route",
    "quarantine",
    "mask",
    "skip_step",
    "hold_push",
    "stop",
    "block",
    "rollback",
]

Fault = Literal[
    "bf16_log_softmax",
    "temperature",
    "top_p",
    "fp8_kv",
    "fp8_weights",
    "stale_layer",
    "wrong_rope",
    "shifted_logprobs",
    "double_bos",
]
"""The self-test's menu (docs/selftest.md)."""

FAULTS: tuple[str, ...] = get_args(Fault)
PROBES: tuple[str, ...] = get_args(Probe)
ACTIONS: tuple[str, ...] = get_args(Action)


@dataclass(frozen=True)
class MetricWord:
    """What a metric promises about, and the range that its per-prompt value lives in.

    floor: the least value it can take.  natural_ceiling: the greatest, None when there is none (a
    clause then needs a ceiling of its own).  bounded_mean: certified as the mean of a bounded
    per-prompt value.  at_least: high is good, so the clause gives ``at_least``, not ``limit``.
    """

    help: str
    unit: str = "nats"
    floor: float = 0.0
    natural_ceiling: float | None = None
    bounded_mean: bool = True
    at_least: bool = False


METRIC_WORDS: dict[str, MetricWord] = {
    "kl_engine_reference": MetricWord(
        "KL(q || p) of the engine's distribution q against the reference's p, over the whole "
        "vocabulary; on rollouts drawn from q it sums to the trajectory's KL"
    ),
    "kl_reference_engine": MetricWord("KL(p || q), the other direction, on the same contexts"),
    "tv": MetricWord("total variation distance between p and q", "", 0.0, 1.0),
    "chi2": MetricWord("E_q[(p/q - 1)^2]: the variance of the importance ratio", ""),
    "drift": MetricWord("largest minus smallest log p - log q over the nucleus"),
    "abs_dlp": MetricWord("|log p - log q| of the sampled token"),
    "flip_rate": MetricWord("share of tokens whose greedy choice differs", "", 0.0, 1.0),
    "k3": MetricWord(
        "w - 1 - ln w with w = p/q of the sampled token: unbiased for KL(q || p) on "
        "tokens drawn from q"
    ),
    "mult_prob_error": MetricWord(
        "mean of exp|log p - log q| of the sampled token; 1 is exact", "x", 1.0
    ),
    "abs_dp": MetricWord(
        "|p - q| of the sampled token, the difference of probabilities that verl logs; never above "
        "1, so its bound needs no ceiling of its own",
        "",
        0.0,
        1.0,
    ),
    "policy_gradient_bias": MetricWord(
        "norm of the policy-gradient bias relative to the gradient's own norm (unbiased estimate, "
        "clustered by prompt)",
        "",
        bounded_mean=False,
    ),
    "policy_gradient_bias_to_noise": MetricWord(
        "norm of the policy-gradient bias relative to the rms of one prompt's gradient: below "
        "1 / sqrt(B) a batch of B prompts is off by more at random",
        "",
        bounded_mean=False,
    ),
    "nonfinite": MetricWord(
        "count of non-finite logits on either side", "values", bounded_mean=False
    ),
    "ess_ratio": MetricWord(
        "effective sample size over sample size of the token weights w = p/q, certified through "
        "the mean of w^2, whose limit is 1 / at_least",
        "",
        at_least=True,
    ),
    "tail_mass": MetricWord("larger of the two masses outside the nucleus", "", 0.0, 1.0),
    "kl": MetricWord("KL between the two ways of computing the same row of the engine"),
}
"""Every metric name of the three sections that measure."""

GRADIENT_METRICS = frozenset({"policy_gradient_bias", "policy_gradient_bias_to_noise"})
"""Measured by autograd of the reference (``audit run --gradient``), not row by row."""

RATE_METRICS = frozenset(n for n, w in METRIC_WORDS.items() if w.natural_ceiling == 1.0)

COMPUTED_COLUMNS: dict[str, str] = {
    "reference_prob": "number",
    "engine_prob": "number",
    "dlp": "number",
    "abs_dlp": "number",
}
"""Columns that slices may name and no table stores: exp of a log-prob, and its difference."""

RECORDED_COLUMNS: dict[str, str] = {
    "step": "number",
    "environment": "text",
    "engine": "text",
    "engine_age": "number",
    "turn": "number",
    "turn_index": "number",
    "advantage_sign": "text",
    "weights_lag": "number",
    "prompt_length": "number",
    "response_length": "number",
    "finish_reason": "text",
    "reward": "number",
    "temperature": "number",
    "n_left_pad": "number",
    "routing_changed": "boolean",
    "kept_mask": "boolean",
    "modality": "text",
}
"""Columns that recorded rollouts have beside those of the token table (docs/rollouts.md)."""

TOKEN_COLUMNS: dict[str, str] = {
    "prompt_id": "text",
    "sequence_id": "text",
    "position": "number",
    "context_length": "number",
    "token_id": "number",
    "path": "text",
    "weights_version": "number",
    "trainer_version": "number",
    "engine_logprob": "number",
    "reference_logprob": "number",
    "kl_engine_reference": "number",
    "kl_reference_engine": "number",
    "tv": "number",
    "chi2": "number",
    "drift": "number",
    "tail_mass": "number",
    "logit_var": "number",
    "entropy": "number",
    "engine_margin": "number",
    "reference_margin": "number",
    "engine_top1": "number",
    "reference_top1": "number",
    "engine_top1_logprob": "number",
    "reference_top1_logprob": "number",
    "flip": "boolean",
    "nonfinite": "number",
    "engine_reported_logprob": "number",
    "kl_lower": "number",
    "kl_upper": "number",
    "tv_lower": "number",
    "tv_upper": "number",
    "kl_method": "text",
    "n_cached_tokens": "number",
    "batch_rows": "number",
    "loss_mask": "boolean",
    "advantage": "number",
    "applied_weight": "number",
}
"""Columns of the token table and the kind of value each holds."""
