"""An engine that shows k log-probs a row: its interval must hold the truth, fail what is broken and
pass nothing that it cannot know."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from kernel_contracts.contract import Contract
from kernel_contracts.errors import InputError
from kernel_contracts.verdict import Evidence, judge
from mismatch_audit.compare import compare_logits
from mismatch_audit.compare.heads import Head
from mismatch_audit.compare.topk_rows import compare_topk, pad_rows

V, H = 200, 16


def pair(rows: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, Head, torch.Tensor]:
    """(reference's hidden rows, its head, engine logits): logits a noise apart."""
    generator = torch.Generator().manual_seed(seed)
    head = Head(weight=torch.randn(V, H, generator=generator))
    hidden = torch.randn(rows, H, generator=generator)
    logits = head.logits(hidden)
    return hidden, head, logits + noise * torch.randn(rows, V, generator=generator)


def top_rows(logits: torch.Tensor, targets: torch.Tensor, k: int) -> list[list[tuple[int, float]]]:
    """What an engine's interface returns: the top k, and the token itself."""
    logp = torch.log_softmax(logits.double(), -1)
    rows = []
    for at, target in enumerate(targets.tolist()):
        chosen = dict.fromkeys([*logp[at].topk(k).indices.tolist(), target])
        rows.append([(token, float(logp[at, token])) for token in chosen])
    return rows


def sampled(logits: torch.Tensor, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("k", [2, 20, 199])
def test_the_interval_holds_the_truth_and_the_rest_is_exact(k: int) -> None:
    """Against the full comparison of the same rows: KL and TV inside their intervals on every row,
    all other columns equal."""
    hidden, head, engine = pair(64, 0.2)
    targets = sampled(engine)
    full = compare_logits(head.logits(hidden), engine, targets)
    got = compare_topk(hidden, head, *pad_rows(top_rows(engine, targets, k)), targets.numpy())
    for metric, low, high in (
        ("kl_engine_reference", "kl_lower", "kl_upper"),
        ("tv", "tv_lower", "tv_upper"),
    ):
        truth = full[metric].numpy()
        assert (got[low] <= truth * (1 + 1e-6) + 1e-9).all()
        assert (truth <= got[high] * (1 + 1e-6) + 1e-9).all()
    for name in (
        "engine_logprob", "reference_logprob", "reference_margin", "engine_margin", "engine_top1",
        "reference_top1", "flip", "entropy", "reference_top1_logprob", "engine_top1_logprob",
    ):  # fmt: skip
        np.testing.assert_allclose(got[name], full[name].numpy(), atol=2e-5, err_msg=name)
    if k >= 20:
        assert (got["kl_lower"] > 0.2 * full["kl_engine_reference"].numpy()).mean() > 0.9


def contract_for(limit: float, tv_limit: float = 0.5) -> Contract:
    return Contract.model_validate(
        {
            "schema": "kernel-contracts/v1",
            "name": "t",
            "slices": {"all": {}},
            "numerical": [
                {"id": "N1", "metric": "kl_engine_reference", "exceeds": 10 * limit, "share": 0.2}
            ],
            "statistical": [
                {"id": "S1", "metric": "kl_engine_reference", "limit": limit,
                 "ceiling": 20 * limit},
                {"id": "S2", "metric": "tv", "limit": tv_limit},
            ],
            "observability": [{"id": "O1", "min_prompts": 10}],
        }
    )  # fmt: skip


def evidence_of(noise: float, k: int, prompts: int = 100) -> Evidence:
    hidden, head, engine = pair(prompts * 4, noise)
    targets = sampled(engine)
    columns = compare_topk(hidden, head, *pad_rows(top_rows(engine, targets, k)), targets.numpy())
    ids = np.repeat([f"p{i}" for i in range(prompts)], 4)
    frame = pd.DataFrame({"prompt_id": ids, "path": "decode", "kl_method": f"top-{k}", **columns})
    return Evidence(
        tokens=frame, prompts=pd.DataFrame({"prompt_id": frame["prompt_id"].unique()}), max_rows=4
    )


def test_a_truncated_kl_can_fail_and_never_passes() -> None:
    """A broken engine fails on lower ends; an exact one, whose lower ends are all about 0, is
    inconclusive on KL (the rest could hide anything) and passes on TV, which has an upper end."""
    broken = {m.clause: m for m in judge(contract_for(1e-3), evidence_of(0.5, 20))}
    assert broken["S1"].verdict == broken["N1"].verdict == "FAIL"
    assert broken["S1"].upper is None
    assert "top-20" in broken["S1"].method
    exact = {m.clause: m for m in judge(contract_for(1e-3), evidence_of(0.0, 20))}
    assert exact["S1"].verdict == exact["N1"].verdict == "INCONCLUSIVE"
    assert exact["S1"].value == pytest.approx(0.0, abs=1e-6)
    assert "never pass" in exact["S1"].detail
    assert exact["S2"].verdict == "PASS"
    assert "mean width" in exact["S2"].detail


def test_rows_without_an_interval_are_no_evidence() -> None:
    """A NaN among the lower ends is missing evidence, as a NaN among values is."""
    evidence = evidence_of(0.0, 20)
    evidence.tokens.loc[3, "kl_lower"] = np.nan
    found = {m.clause: m.verdict for m in judge(contract_for(1e-3), evidence)}
    assert found["S1"] == found["N1"] == "UNOBSERVED"
    assert found["S2"] == "PASS"


def test_a_row_must_hold_its_own_token() -> None:
    """Without the sampled token's log-prob nothing can be said of what was drawn."""
    hidden, head, _engine = pair(3, 0.0)
    ids, logprobs = pad_rows([[(1, -0.5), (2, -1.0)]] * 3)
    with pytest.raises(InputError, match="gave no log-prob of the token 5"):
        compare_topk(hidden, head, ids, logprobs, np.array([1, 5, 2]))


def test_a_non_finite_row_is_counted_and_gives_no_interval() -> None:
    """One NaN log-prob of the engine: the row is counted, the others keep their intervals."""
    hidden, head, engine = pair(3, 0.1)
    targets = sampled(engine)
    rows = top_rows(engine, targets, 5)
    rows[1][-1] = (rows[1][-1][0], float("nan"))
    got = compare_topk(hidden, head, *pad_rows(rows), targets.numpy())
    assert got["nonfinite"].tolist() == [0, 1, 0]
    assert np.isnan(got["kl_lower"]).tolist() == [False, True, False]
