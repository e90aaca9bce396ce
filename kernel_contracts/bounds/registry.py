"""Every bound by name, for reports and documents: what it says, and when it says nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernel_contracts.bounds import (
    flips,
    gradient,
    partial,
    ratio,
    sequence,
    surrogate,
    token,
    truncated,
    weighted,
)

__all__ = ["BOUNDS", "Bound"]


@dataclass(frozen=True)
class Bound:
    """One bound. symbol: the quantity bounded.  formula: its bound, in ASCII.

    trivial: the value that holds without any evidence, for rewards in units of the reward range,
    for gradients in units of F (token) or T F (response); infinity where every finite value says
    something.  lower: a lower bound (an effective sample share), so vacuous at or *below* trivial.
    attained: some pair reaches or approaches it, and the tests find that pair.
    """

    name: str
    symbol: str
    formula: str
    function: Callable[..., Any]
    trivial: float
    lower: bool = False
    attained: bool = True

    def vacuous(self, value: float) -> bool:
        """True where the bound says nothing. NaN says nothing."""
        if math.isnan(value):
            return True
        return value <= self.trivial if self.lower else value >= self.trivial


_INF = math.inf

BOUNDS: tuple[Bound, ...] = (
    # One token, from a drift D.
    Bound("token log-ratio", "|log p - log q|", "D", token.log_ratio_from_drift, _INF),
    Bound("token TV", "TV", "tanh(D/4)", token.tv_from_drift, 1.0),
    Bound("token KL", "KL", "ln((e^D-1)/D) - 1 + D/(e^D-1)", token.kl_from_drift, _INF),
    Bound("token Jeffreys", "KL + KL", "D tanh(D/4)", token.jeffreys_from_drift, _INF),
    Bound("token chi2", "chi2", "sinh^2(D/2)", token.chi2_from_drift, _INF),
    Bound("token Bhattacharyya", "BC", "sech(D/4)", token.bhattacharyya_from_drift, 0.0, True),
    Bound("token Hellinger", "H^2", "1 - sech(D/4)", token.hellinger2_from_drift, 1.0),
    Bound("token ESS", "ESS/n", "sech^2(D/2)", token.ess_from_drift, 0.0, True),
    Bound("token excess weight", "E_q(w-C)_+", "(e^(D/2)-sqrt C)^2/(e^D-1)",
          token.hockey_stick_from_drift, 1.0),
    Bound("token excess weight, chi2", "E_q(w-C)_+", "chi2/(4(C-1))",
          token.hockey_stick_from_chi2, 1.0),
    Bound("token movement", "|p(v) - q(v)|", "q(1-q)(e^D-1)/(1+min(q,1-q)(e^D-1))",
          token.movement_from_drift, 1.0),
    Bound("token KL, variance", "KL(q||p)", "Var_q(d) (e^D-1-D)/D^2", token.kl_from_variance, _INF),
    # One token, from a ratio error rho, a KL, or a part of the vocabulary.
    Bound("token TV, ratio", "TV", "rho/2", ratio.tv_from_ratio, 1.0),
    Bound("token chi2, ratio", "chi2(p||q)", "rho^2", ratio.chi2_from_ratio, _INF),
    Bound("token KL(q||p), ratio", "KL(q||p)", "-ln(1-rho^2)/2",
          ratio.kl_engine_reference_from_ratio, _INF),
    Bound("token KL(p||q), ratio", "KL(p||q)", "[(1+rho)ln(1+rho)+(1-rho)ln(1-rho)]/2",
          ratio.kl_reference_engine_from_ratio, _INF),
    Bound("TV, KL", "TV", "min(sqrt(KL/2), sqrt(1-e^-KL))", ratio.tv_from_kl, 1.0),
    Bound("token TV, nucleus", "TV", "(1-tau) tanh(D_S/4) + tau", partial.tv_from_nucleus, 1.0),
    Bound("token KL, nucleus", "KL(q||p)", "kl_bin(Q_t||P_t) + (1-Q_t) K(D_S) + Q_t K(D_t)",
          partial.kl_from_nucleus, _INF),
    Bound("mean TV, clause", "E TV", "(1-eta) tanh(D*/4) + eta", partial.tv_mean_from_clause, 1.0),
    Bound("TV, truncated sampling", "TV", "tanh(D_B/4) + 1 - p(A and B)/max(p(A), p(B))",
          truncated.tv_from_truncation, 1.0),
    # Flips and sampled tokens.
    Bound("flip certificate", "P(flip)", "P(m <= D)", flips.flip_rate_from_certificate, 1.0,
          attained=False),
    Bound("flip rate, split", "P(flip)", "min_t P(m <= t) + P(D > t)", flips.flip_rate_from_split,
          1.0, attained=False),
    Bound("flip top-1", "top-1 probability", "1/(1+e^-D)", flips.flip_needs_top1_below, 1.0),
    Bound("flip regret", "log p(best) - log p(emitted)", "D", flips.flip_regret_from_drift, _INF),
    Bound("text differs", "P(text differs)", "T P(flip)", flips.sequence_flip_rate, 1.0),
    Bound("same-seed disagreement", "P(tokens differ)", "[TV, 2TV/(1+TV)]",
          flips.race_disagreement_from_tv, 1.0),
    # Sequences.
    Bound("sequence TV, mean KL", "TV_seq", "min(sqrt(T kappa/2), sqrt(1-e^(-T kappa)))",
          sequence.sequence_tv_from_mean_kl, 1.0),
    Bound("sequence TV, mean TV", "TV_seq", "sum_t E_Q TV_t", sequence.sequence_tv_from_mean_tv,
          1.0),
    Bound("sequence TV, largest TV", "TV_seq", "1-(1-eps)^T", sequence.sequence_tv_from_sup_tv,
          1.0),
    Bound("sequence TV, drift", "TV_seq", "sqrt(1-sech^(2T)(D/4))",
          sequence.sequence_tv_from_drift, 1.0),
    Bound("sequence chi2", "chi2_seq", "cosh^(2T)(D/2) - 1", sequence.sequence_chi2_from_drift,
          _INF),
    Bound("sequence ESS", "ESS_seq/n", "sech^(2T)(D/2)", sequence.sequence_ess_from_drift, 0.0,
          True),
    Bound("reward drift", "|E_P R - E_Q R|", "range(R) TV_seq", sequence.reward_drift, 1.0),
    # Surrogate error.
    Bound("surrogate, classical", "|Error|", "T(T-1) eps^2", surrogate.surrogate_classical, 1.0),
    Bound("surrogate, coupling", "|Error|", "2 eps sum_t min(1,(t-1) eps)",
          surrogate.surrogate_coupling, 1.0),
    Bound("surrogate, Pinsker-marginal", "|Error|",
          "2 sqrt(delta/2) sum_t min(1,sqrt((t-1) delta/2))",
          surrogate.surrogate_pinsker_marginal, 1.0, attained=False),
    Bound("surrogate, Mixed KL", "|Error|", "T sqrt(delta KL_seq)", surrogate.surrogate_mixed_kl,
          1.0, attained=False),
    Bound("surrogate, Mixed TV", "|Error|", "2 T eps TV_seq", surrogate.surrogate_mixed_tv, 1.0,
          attained=False),
    Bound("surrogate, Adaptive", "|Error|",
          "2 sum_t E TV_t min(1,(T-t) eps,sqrt((T-t) delta/2))",
          surrogate.surrogate_adaptive, 1.0),
    Bound("surrogate, unified", "|Error|", "the least of these", surrogate.surrogate_unified, 1.0),
    # Policy-gradient bias.
    Bound("bias, no weights, token", "||g_0 - g||", "2 F TV", gradient.bias_none_token, 2.0),
    Bound("bias, no weights, L2", "||g_0 - g||", "A_max sqrt(chi2(q||p)) sqrt(E_p||s||^2)",
          gradient.l2_bias, _INF),
    Bound("bias, no weights, natural", "||g_0 - g||_Fisher^-1", "A_max sqrt(chi2(q||p))",
          gradient.natural_bias, _INF),
    Bound("bias of a baseline", "||E_q[b s]||", "2 |b| G TV", gradient.bias_baseline, _INF),
    Bound("bias, no weights, response", "||g_0 - g||", "2 T F TV_seq",
          gradient.bias_none_trajectory, 2.0),
    Bound("bias, no weights, response, drift", "||g_0 - g||",
          "F sqrt(T) sqrt(cosh^(2T)(D/2) - 1)", gradient.l2_bias_from_drift, 2.0),
    Bound("bias, token weights", "||g_w - g||", "2 F T min(1,(T-1) eps)",
          weighted.bias_token_weights, 2.0),
    Bound("bias, cumulative weights", "||g_w - g||", "2 F sum_t min(1,(T-t) eps)",
          weighted.bias_cumulative_weights, 2.0),
    Bound("bias, response weights", "||g_W - g||", "F_T P(unsupported)",
          weighted.bias_full_weights, 1.0),
    Bound("bias, truncated weights", "||g_C - g||", "F_T E_Q(W-C)_+", weighted.bias_truncated,
          1.0),
    Bound("bias, truncated weights, drift", "||g_C - g||", "F (e^(D/2)-sqrt C)^2/(e^D-1)",
          weighted.bias_truncated_from_drift, 1.0),
    Bound("bias, masked weights", "||g_m - g||", "F_T P_P(W outside [a, b])",
          weighted.bias_masked, 1.0),
    Bound("bias, clipped weights", "||g_c - g||", "F E_q|w - clip w|", weighted.bias_clipped, 2.0),
    Bound("tail of W", "P_P(W > C)", "exp(-2 (ln C - T K(D))_+^2/(T D^2))",
          weighted.weight_tail_from_drift, 1.0, attained=False),
)  # fmt: skip
"""All of them. Each function's docstring gives source, units, domain and what attains it."""
