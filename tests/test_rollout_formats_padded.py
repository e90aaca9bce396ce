"""Whatever the padding and the alignment, undoing them gives back the sequence: for random lengths,
both padding sides, and each of the alignments that trainers use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_audit.rollouts.formats.padded import Layout, rows
from mismatch_audit.rollouts.formats.tidy import logprobs, origins

COLUMNS = {"sampler_logprob": ("q",), "trainer_logprob": ("p",)}
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


def batch(lengths: list[tuple[int, int]], align: str, left: bool, seed: int) -> tuple[Any, Any]:
    """Arrays of a batch in one alignment, and the rows that they stand for."""
    random = np.random.default_rng(seed)
    before, after = max(p for p, _ in lengths), max(r for _, r in lengths)
    n, width = len(lengths), before + after
    ids = np.zeros((n, width), dtype=np.int64)
    attention, mask = np.zeros_like(ids), np.zeros_like(ids)
    full = {"q": np.zeros((n, width)), "p": np.zeros((n, width))}
    truth = []
    for b, (prompt, response) in enumerate(lengths):
        # Prompts end where responses start; or, as SkyRL has it, everything is flush right.
        start = (before if left else width - response) - prompt
        own = slice(start + prompt, start + prompt + response)
        ids[b, start : start + prompt + response] = random.integers(0, 99, prompt + response)
        attention[b, start : start + prompt + response] = 1
        mask[b, own] = 1
        for values in full.values():
            values[b, own] = np.float32(-random.exponential(1, response) - 0.1)
        truth.append((ids[b, start : start + prompt + response], prompt,
                      full["q"][b, own], full["p"][b, own]))  # fmt: skip
    cut: Any = {
        "full": lambda a: a,
        "response": lambda a: a[:, before:] if left else a[:, width - after :],
        "next": lambda a: a[:, 1:],
        "rolled": lambda a: np.roll(a, -1, axis=1),
    }[align]
    arrays = {"ids": ids, "attention_mask": attention, "mask": cut(mask)}
    return {**arrays, **{name: cut(values) for name, values in full.items()}}, truth


@pytest.mark.parametrize("align", ["full", "response", "next", "rolled"])
@pytest.mark.parametrize("left", [True, False])
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 2**16))
def test_padding_and_alignment_are_undone(
    align: str, left: bool, lengths: list[tuple[int, int]], seed: int
) -> None:
    """Tokens (id 0 among them, which is also the filler), prompt length and both log-probs."""
    arrays, truth = batch(lengths, align, left, seed)
    wide = "next" if align in ("next", "rolled") else "full"
    layout = Layout(ids=("ids",), sampled=("mask",), columns=COLUMNS, wide=wide)  # type: ignore[arg-type]
    found = list(rows(arrays, layout, {}, ""))
    assert len(found) == len(truth)
    for row, (ids, prompt, q, p) in zip(found, truth, strict=True):
        assert row["token_ids"].tolist() == ids.tolist()
        assert row["prompt_len"] == prompt
        assert np.isnan(row["sampler_logprob"][:prompt]).all()
        np.testing.assert_allclose(row["sampler_logprob"][prompt:], q, rtol=1e-6)
        np.testing.assert_allclose(row["trainer_logprob"][prompt:], p, rtol=1e-6)
        assert row["origin"].tolist() == [0] * prompt + [1] * len(q)


def test_the_wrong_alignment_would_show() -> None:
    """The control: read as unshifted, a shifted batch does not give the truth back."""
    arrays, truth = batch([(3, 4), (2, 5)], "rolled", True, 1)
    layout = Layout(ids=("ids",), sampled=("mask",), columns=COLUMNS, wide="full")
    row = next(iter(rows(arrays, layout, {}, "")))
    assert row["prompt_len"] != truth[0][1]


def test_a_sequence_with_nothing_to_train_on_keeps_its_response() -> None:
    """A zeroed loss mask (an overlong or filtered rollout) leaves the tokens the sampler's own, so
    that they can be looked at, and none of them in the loss."""
    arrays, _ = batch([(2, 3)], "full", True, 0)
    response = arrays["mask"].copy()
    arrays |= {"response_mask": response, "mask": np.zeros_like(response)}
    layout = Layout(("ids",), COLUMNS, ("mask",), response=("response_mask",))
    row = next(iter(rows(arrays, layout, {}, "")))
    assert row["origin"].tolist() == [0, 0, 1, 1, 1]
    assert not row["loss_mask"].any()
    assert np.isfinite(row["sampler_logprob"][2:]).all()


def test_sentinels_are_nulls_only_where_they_mean_none() -> None:
    outside = np.array([True, True, False, False])
    found = logprobs([0.0, -3.0, 0.0, -9999.0], outside, clamped=-9999.0)
    assert found is not None
    assert [None if np.isnan(v) else float(v) for v in found] == [None, -3.0, 0.0, None]
    own = np.array([False, True, False, True])
    assert origins(own, 1).tolist() == [0, 1, 2, 1]
