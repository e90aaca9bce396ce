"""A batch is freed when it was counted, whatever looked at it; and decoding is Arrow's."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pyarrow as pa
import pytest
from rollout_logs import log, parquet

from kernel_contracts.loading import load_contract
from mismatch_audit.rollouts.allocator import keep_freed_memory
from mismatch_audit.rollouts.batch import _filled
from mismatch_audit.rollouts.checks import all_checks
from mismatch_audit.rollouts.checks.view import TokenView
from mismatch_audit.rollouts.formats import ReadOptions, open_sources
from mismatch_audit.rollouts.judge import thresholds
from mismatch_audit.rollouts.run import DEFAULT_CONTRACT
from mismatch_audit.rollouts.staleness import Staleness
from mismatch_audit.rollouts.stream import Stream


def test_no_check_keeps_a_batch_alive(tmp_path) -> None:
    """Without the garbage collector: a cycle through a batch cost 1.2 GB on 100 million tokens."""
    path = parquet(tmp_path / "a.parquet", log(60, sd=0.01))
    (source,), _ = open_sources([path], "auto", ReadOptions(batch_tokens=400))
    contract = load_contract(DEFAULT_CONTRACT)
    stream, seen = Stream(contract, thresholds(contract)), []
    watchers = [*all_checks(), Staleness()]
    gc.disable()
    try:
        for batch in source.batches:
            stream.update(batch, stream.prepare(batch))
            for one in watchers:
                one.update(batch)
            seen.append(weakref.ref(batch))
        del batch
        assert len(seen) > 3
        assert [ref for ref in seen if ref() is not None] == []
    finally:
        gc.enable()
        stream.close()


def test_a_view_says_that_its_batch_is_gone(tmp_path) -> None:
    path = parquet(tmp_path / "a.parquet", log(4, sd=0.01))
    (source,), _ = open_sources([path], "auto", ReadOptions())
    view = TokenView(next(iter(source.batches)))
    with pytest.raises(ReferenceError, match="batch is gone"):
        _ = view.batch


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("stored", [pa.float32(), pa.float64()])
def test_nulls_become_nan_as_arrow_makes_them(kind: str, stored: pa.DataType) -> None:
    """Slices whose validity bits begin anywhere in a byte, with and without a null."""
    whole = pa.array([1.5, None, 2.5, None, float("nan"), -3.0, float("inf")] * 5, stored)
    for start in range(17):
        for length in (1, 2, 9, 18):
            part = whole[start : start + length]
            expected = np.asarray(part.to_numpy(zero_copy_only=False), dtype=kind)
            got = _filled(part, kind)
            assert got.dtype == kind
            np.testing.assert_array_equal(got, expected)


def test_the_allocator_takes_the_thresholds_on_glibc() -> None:
    import platform

    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
