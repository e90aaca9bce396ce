"""verl's own rollout-correction metrics are the oracle where definitions agree; where they do not,
the difference is the documented one."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
helper = pytest.importorskip(
    "verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed", exc_type=ImportError
)

from mismatch_audit.rollouts.statistics import batch_statistics  # noqa: E402

SAME = {
    "kl": "k1",
    "k3_kl": "k3",
    "training_ppl": "ppl_trainer",
    "rollout_ppl": "ppl_sampler",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff",
    "ppl_ratio": "ppl_ratio",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_seq_product",
}
"""verl's name -> ours."""


def batch(seed: int, sd: float, rows: int = 16, width: int = 60):
    rng = np.random.default_rng(seed)
    q = -rng.exponential(0.7, (rows, width))
    p = q + rng.normal(0, sd, q.shape)
    mask = np.arange(width) < rng.integers(3, width, rows)[:, None]
    return q, p, mask


@pytest.mark.parametrize(("seed", "sd"), [(0, 0.03), (1, 0.2), (2, 0.6)])
def test_equal_where_definitions_agree(seed, sd):
    """kl, k3, perplexities and chi-square of verl 0.9.1 in float64, from bf16-like noise to a pair
    that is badly off. verl divides by (tokens + 1e-8) and the values differ by that much."""
    q, p, mask = batch(seed, sd)
    theirs = helper.compute_offpolicy_metrics(
        torch.tensor(p), torch.tensor(q), torch.tensor(mask).double()
    )
    ours = batch_statistics(q, p, mask).as_dict()
    assert {k: ours[v] for k, v in SAME.items()} == pytest.approx(
        {k: theirs[k] for k in SAME}, rel=1e-6, abs=1e-9
    )


def test_effective_sample_size_agrees_on_raw_weights_alone():
    """verl's ESS is of weights clamped at the threshold: equal to ours where none is clamped, near
    1 on a broken pair, where ours says what the weights really are worth."""

    def theirs(q, p, mask, threshold):
        _, metrics = helper.compute_rollout_correction_weights(
            torch.tensor(p - q), torch.tensor(mask).double(), "token", threshold
        )
        return next(v for k, v in metrics.items() if k.endswith("eff_sample_size"))

    q, p, mask = batch(3, 0.1)
    assert batch_statistics(q, p, mask).ess_token == pytest.approx(
        theirs(q, p, mask, 50.0), rel=1e-6
    )
    q, p, mask = batch(4, 0.5)
    p = p + np.where(np.arange(60) % 2, 6.0, 2.0)  # every weight beyond the cap
    assert theirs(q, p, mask, 2.0) > 0.95
    assert batch_statistics(q, p, mask).ess_token < 0.6


def test_probability_difference_is_verls_debug_metric():
    """``rollout_probs_diff_mean`` is mean |p - q| of the sampled tokens."""
    q, p, mask = batch(5, 0.2)
    expected = torch.abs(torch.tensor(p).exp() - torch.tensor(q).exp())[torch.tensor(mask)].mean()
    assert batch_statistics(q, p, mask).abs_dp == pytest.approx(float(expected))
