"""The comparison on a CPU: hands rows to the numba kernel and names what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mismatch_audit.compare import cpu_kernel as kernel
from mismatch_audit.compare import torch_rows
from mismatch_audit.compare.numba_support import share_out

_VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}

_SLOTS = {
    "kl_engine_reference": kernel.KL_QP,
    "kl_reference_engine": kernel.KL_PQ,
    "tv": kernel.TV,
    "chi2": kernel.CHI2,
    "drift": kernel.DRIFT,
    "tail_mass": kernel.TAIL,
    "logit_var": kernel.VAR,
    "entropy": kernel.ENTROPY,
    "reference_logprob": kernel.TARGET_P,
    "reference_margin": kernel.MARGIN_P,
    "reference_top1_logprob": kernel.TOP_P,
    "engine_logprob": kernel.TARGET_Q,
    "engine_margin": kernel.MARGIN_Q,
    "engine_top1_logprob": kernel.TOP_Q,
}
_OWN_SLOTS = {
    "logprob": kernel.TARGET_P,
    "margin": kernel.MARGIN_P,
    "top1_logprob": kernel.TOP_P,
    "entropy": kernel.ENTROPY,
}


def supports(dtype: torch.dtype) -> bool:
    """Whether these kernels take logits of this dtype: fp32, bf16 or fp16."""
    return dtype in _VIEWS


def compare(
    z_p: torch.Tensor, z_q: torch.Tensor, target_ids: torch.Tensor, *, eta: float
) -> dict[str, torch.Tensor]:
    """Every column of the comparison, each ``[T]``, from ``[T, V]`` logits that are supported."""
    a, b, ids = _array(z_p), _array(z_q), _ids(target_ids)
    out, top1 = _results(len(ids))
    threshold = np.float32(eta)
    share_out(len(ids), lambda lo, hi: kernel.compare_rows(a, b, ids, threshold, lo, hi, out, top1))
    columns = _columns(_SLOTS, out, z_p, z_q)
    columns["reference_top1"], columns["engine_top1"] = torch.from_numpy(top1.T.copy())
    columns["flip"] = columns["reference_top1"] != columns["engine_top1"]
    for t in np.flatnonzero(out[:, kernel.STATUS] == kernel.TOO_WIDE):
        one = slice(t, t + 1)
        row = torch_rows.compare_whole(z_p[one], z_q[one], target_ids[one], eta=eta)
        for name, column in columns.items():
            column[one] = row[name]
    return columns


def log_probs(logits: torch.Tensor, target_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of one side: ``logprob, margin, top1, top1_logprob, entropy, nonfinite``, each ``[T]``."""
    z, ids = _array(logits), _ids(target_ids)
    out, top1 = _results(len(ids))
    share_out(len(ids), lambda lo, hi: kernel.score_rows(z, ids, lo, hi, out, top1))
    columns = _columns(_OWN_SLOTS, out, logits)
    columns["top1"] = torch.from_numpy(top1[:, 0].copy())
    return columns


def _array(logits: torch.Tensor) -> Any:
    return logits.detach().contiguous().view(_VIEWS[logits.dtype]).numpy()


def _ids(target_ids: torch.Tensor) -> Any:
    return target_ids.to(device="cpu", dtype=torch.int64).contiguous().numpy()


def _results(rows: int) -> tuple[Any, Any]:
    return np.empty((rows, kernel.RESULTS)), np.full((rows, 2), -1, np.int64)


def _columns(slots: dict[str, int], out: Any, *sides: torch.Tensor) -> dict[str, torch.Tensor]:
    bad = out[:, kernel.STATUS] == kernel.NONFINITE
    out[bad, : kernel.STATUS] = np.nan
    columns = {name: torch.from_numpy(out[:, slot].copy()) for name, slot in slots.items()}
    columns["nonfinite"] = torch.zeros(len(out), dtype=torch.int64)
    for t in np.flatnonzero(bad):
        columns["nonfinite"][t] = sum(int((~side[t].isfinite()).sum()) for side in sides)
    return columns
