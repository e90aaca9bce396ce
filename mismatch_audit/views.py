"""What the report draws: aggregates of the token table, and the worst tokens in context."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from kernel_contracts.confidence import clopper_pearson

MARGIN_EDGES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, float("inf"))
PROBABILITY_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)
SCATTER_POINTS = 1500


def _bins(values: pd.Series, edges: tuple[float, ...]) -> list[tuple[float, float, Any]]:
    """(low, high, mask) of half-open bins; the last is closed."""
    found = []
    for low, high in itertools.pairwise(edges):
        last = high == edges[-1]
        mask = (values >= low) & ((values <= high) if last else (values < high))
        found.append((low, high, mask))
    return found


def flip_by_margin(tokens: pd.DataFrame, alpha: float) -> list[dict[str, Any]]:
    """Flip rate by reference margin. The interval treats tokens as independent: for the eye only,
    the verdicts cluster by prompt."""
    rows = []
    for low, high, mask in _bins(tokens["reference_margin"], MARGIN_EDGES):
        n, k = int(mask.sum()), int(tokens["flip"][mask].sum())
        if n:
            lower, upper = clopper_pearson(k, n, alpha)
            rows.append(
                {
                    "lo": low,
                    "hi": None if np.isinf(high) else high,
                    "n": n,
                    "rate": k / n,
                    "lower": lower,
                    "upper": upper,
                }
            )
    return rows


def kl_by_position(tokens: pd.DataFrame) -> list[dict[str, Any]]:
    """Mean and 95th percentile of KL(q || p) by position in the response, at most 16 bins."""
    if tokens.empty:
        return []
    step = max(1, -(-(int(tokens["position"].max()) + 1) // 16))
    rows = []
    for low, part in tokens.groupby(tokens["position"] // step * step):
        kl = part["kl_engine_reference"].dropna()
        if len(kl):
            rows.append(
                {
                    "lo": float(low),
                    "hi": float(low + step),
                    "n": len(kl),
                    "mean": float(kl.mean()),
                    "p95": float(kl.quantile(0.95)),
                }
            )
    return rows


def kl_by_reference_prob(tokens: pd.DataFrame) -> list[dict[str, Any]]:
    """Mean KL and mean |log p - log q| by the reference's probability of the token."""
    probability = np.exp(tokens["reference_logprob"])
    gap = (tokens["reference_logprob"] - tokens["engine_logprob"]).abs()
    rows = []
    for low, high, mask in _bins(probability, PROBABILITY_EDGES):
        kl = tokens["kl_engine_reference"][mask].dropna()
        if len(kl):
            rows.append(
                {
                    "lo": low,
                    "hi": high,
                    "n": len(kl),
                    "mean": float(kl.mean()),
                    "mean_abs_dlp": float(gap[mask].mean()),
                }
            )
    return rows


def scatter(tokens: pd.DataFrame) -> dict[str, list[float]]:
    """Log-probs of both sides: every k-th token, so that a report is the same each time."""
    finite = tokens[["reference_logprob", "engine_logprob"]].dropna()
    step = max(1, -(-len(finite) // SCATTER_POINTS))
    some = finite.iloc[::step].round(4)
    return {
        "reference": some["reference_logprob"].tolist(),
        "engine": some["engine_logprob"].tolist(),
    }


def worst_tokens(
    tokens: pd.DataFrame,
    sequences: pd.DataFrame,
    prompts: pd.DataFrame,
    tokenizer: Any,
    count: int = 12,
) -> list[dict[str, Any]]:
    """The rows with the largest KL (its lower end where only that is known), at most two a prompt,
    with the text that led there."""
    if tokens.empty:
        return []
    if "kl_lower" in tokens:
        kl = tokens["kl_engine_reference"].fillna(tokens["kl_lower"])
        tokens = tokens.assign(kl_engine_reference=kl)
    ids = sequences.set_index("sequence_id")["token_ids"]
    lengths = sequences.set_index("sequence_id")["prompt_length"]
    domains = (
        prompts.set_index("prompt_id")["domain"] if "domain" in prompts else pd.Series(dtype=str)
    )
    order = tokens.sort_values(
        ["kl_engine_reference", "prompt_id", "position"], ascending=[False, True, True]
    )
    chosen = order[order.groupby("prompt_id").cumcount() < 2].head(count)
    rows = []
    for values in chosen.to_dict("records"):
        row = SimpleNamespace(**{str(k): v for k, v in values.items()})
        at = int(lengths[row.sequence_id]) + int(row.position)
        before = list(ids[row.sequence_id][max(0, at - 24) : at])
        rows.append(
            {
                "prompt_id": row.prompt_id,
                "domain": str(domains.get(row.prompt_id, "")),
                "position": int(row.position),
                "path": row.path,
                "before": tokenizer.decode(before),
                "token": tokenizer.decode([row.token_id]),
                "reference_top": tokenizer.decode([row.reference_top1]),
                "engine_top": tokenizer.decode([row.engine_top1]),
                "reference_top_prob": float(np.exp(row.reference_top1_logprob)),
                "engine_top_prob": float(np.exp(row.engine_top1_logprob)),
                "reference_prob": float(np.exp(row.reference_logprob)),
                "engine_prob": float(np.exp(row.engine_logprob)),
                "kl": float(row.kl_engine_reference),
                "margin": float(row.reference_margin),
                "flip": bool(row.flip),
            }
        )
    return rows


def probe_means(probes: pd.DataFrame) -> list[dict[str, Any]]:
    """Mean of each probe's metrics over its prompts."""
    if probes.empty:
        return []
    return [
        {
            "probe": str(name),
            "metric": metric,
            "value": float(rows[metric].mean()),
            "n_prompts": len(rows),
            "n_tokens": int(rows["n_tokens"].sum()),
        }
        for name, rows in probes.groupby("probe", sort=True)
        for metric in ("kl", "abs_dlp", "flip_rate")
    ]
