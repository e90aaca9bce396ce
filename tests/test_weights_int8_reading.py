"""Reading an int8 payload through a kernel, sound or saturating: exact, or said to be inexact.

The argument: the kernel here is the real arithmetic (symmetric per-token activations, payload times
scales in fp32), with and without the 16-bit saturation of x86 CPUs that lack VNNI; the payload that
it was given must come back in every bit, and another scale in the kernel must be noticed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_audit.weights.live.int8 import read_int8
from mismatch_audit.weights.schemes import scheme_by_name

Kernel = Callable[[torch.Tensor], torch.Tensor]


def kernel(payload: torch.Tensor, scale: torch.Tensor, saturates: bool) -> Kernel:
    """x [n, in] -> [n, out], as oneDNN computes it: u8 activations, pairs of products summed."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(1, keepdim=True) / 127
        q = (x / step).round().clamp(-128, 127).long()
        pairs = ((q + 128)[:, None, :] * payload.long()[None]).unflatten(2, (-1, 2)).sum(3)
        if saturates:
            pairs = pairs.clamp(-32768, 32767)
        sums = pairs.sum(2) - 128 * payload.long().sum(1)
        return sums.float() * step * scale.t()

    return apply


def weights(seed: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    return scheme_by_name("channel_int8").encode(weight)


@given(st.integers(0, 1000), st.integers(2, 40), st.sampled_from([32, 128, 300]))
@settings(max_examples=25, deadline=None)
def test_the_payload_comes_back_exactly(seed: int, rows: int, columns: int) -> None:
    payload, scale = weights(seed, rows, columns)
    for saturates in (False, True):
        reading = read_int8(kernel(payload, scale, saturates), columns, scale, exact=True)
        assert torch.equal(reading.payload, payload)
        assert torch.equal(reading.scale, scale)
        assert reading.whole
        assert not reading.off_scale
        assert saturates or not reading.saturates


def test_saturation_is_told_and_would_have_been_wrong() -> None:
    payload, scale = weights(0, 64, 256)
    apply = kernel(payload, scale, True)
    plain = (apply(torch.eye(256)).t() / scale).round()
    assert int((plain != payload).sum()) > 10
    assert read_int8(apply, 256, scale, exact=True).saturates


def test_another_scale_in_the_kernel_is_noticed_and_taken() -> None:
    payload, scale = weights(1, 32, 128)
    reading = read_int8(kernel(payload, scale * 1.37, False), 128, scale, exact=True)
    assert reading.off_scale
    assert torch.allclose(reading.scale, scale * 1.37, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("saturates", [False, True])
def test_one_bad_scale_spoils_its_own_row_only(bad: float, saturates: bool) -> None:
    payload, scale = weights(2, 32, 128)
    pushed = scale.clone()
    pushed[3] = bad
    reading = read_int8(kernel(payload, pushed, saturates), 128, pushed, exact=True)
    others = torch.arange(32) != 3
    assert torch.equal(reading.payload[others], payload[others])
    assert torch.equal(reading.scale[others], scale[others])
    assert not bool(torch.isfinite(reading.scale[3]).any())
    assert not reading.off_scale  # parameter and kernel agree that it is bad


def test_a_kernel_that_does_not_follow_its_parameter_is_noticed() -> None:
    """Marks that stayed in the parameters while the kernel holds scales of its own, and garbage in
    the kernel beside sound parameters: neither is an agreement."""
    payload, scale = weights(2, 32, 128)
    marked = torch.full_like(scale, torch.nan)
    assert read_int8(kernel(payload, scale, False), 128, marked, exact=True).off_scale
    freed = read_int8(kernel(payload, marked, False), 128, scale, exact=True)
    assert freed.off_scale
    assert not bool(torch.isfinite(freed.scale).any())


def test_coarse_outputs_that_saturate_are_not_taken_for_whole() -> None:
    """In bf16 the careful reading cannot work; then the layer is unread, never guessed."""
    payload, scale = weights(0, 64, 256)
    apply = kernel(payload, scale, True)
    reading = read_int8(lambda x: apply(x).bfloat16().float(), 256, scale, exact=False)
    assert not reading.whole
