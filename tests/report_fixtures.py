"""Synthetic records for the tests of reports: realistic numbers, and hostile text.

The numbers follow a bf16 engine against an fp32 reference: mean KL about 1.4e-3, 3 % flips, most
of them where the reference is undecided.
"""

from __future__ import annotations

import math
import random
from typing import Any

from kernel_contracts.measurement import EXIT_CODES
from mismatch_audit.reports.record import Record

DOMAINS = ("arithmetic", "code", "creative", "factual", "instruction", "long", "multilingual")
DIGEST = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"

HOSTILE = (
    '<script>alert("x")</script>',
    "</td></table>'\"><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b]0;title\x07\x1b[2J",
    "[bold red]markup[/] [link=file:///etc/passwd]x[/link]",
    "a | b `c` **d** _e_ [f](javascript:alert(1)) @everyone #1",
    "line one\n::error file=x::injected\r::set-output name=a::b",
    '=HYPERLINK("x";"y")',
    "\u202eevil\u2066\u200f\x00\x85\u2028end",
    "]]> &amp; {{ 7 * 7 }} {% raw %}",
    "100%25 %0A,:%",
)
"""Texts that a projection must show harmlessly: markup, terminal codes, commands, formulas."""


def row(**changes: Any) -> dict[str, Any]:
    """A measurement that passes."""
    base: dict[str, Any] = {
        "clause": "S1",
        "slice": "all",
        "metric": "kl_engine_reference",
        "section": "statistical",
        "value": 1.41e-3,
        "lower": 1.12e-3,
        "upper": 1.83e-3,
        "limit": 2.0e-3,
        "n_prompts": 126,
        "n_tokens": 5880,
        "noise_floor": 2.1e-7,
        "method": "betting, ceiling 0.01",
        "verdict": "PASS",
        "detail": "",
        "warn": False,
        "unit": "nats",
        "path": "decode",
        "p_fail": 1.0,
    }
    return base | changes


def measurements() -> list[dict[str, Any]]:
    """A contract's worth of rows in which every verdict but UNSOUND occurs."""
    share = "share of tokens > 0.693"
    rows = [
        row(clause="N1", metric="nonfinite", section="numerical", value=0.0, lower=0.0, upper=0.0,
            limit=0.0, n_tokens=11760, noise_floor=None, method="exact count", unit="values",
            path="both", p_fail=None),
        row(clause="N2", metric="abs_dlp", section="numerical", value=1.7e-4, lower=0.0,
            upper=0.0391, limit=0.05, n_tokens=11760, noise_floor=None, unit=share, path="both",
            method="betting, ceiling 1"),
        row(warn=True),
    ]  # fmt: skip
    for i, domain in enumerate(DOMAINS):
        value = 1.0e-3 + 2.1e-4 * i
        verdict, detail = "PASS", ""
        upper, lower, limit = value * 3.1, value * 0.4, 1.0e-2
        if domain == "multilingual":
            verdict, value, lower, upper = "FAIL", 1.71e-2, 1.12e-2, 2.0e-2
            detail = "3 of 18 prompts above the ceiling 0.02"
        if domain == "long":
            verdict, upper, detail = "INCONCLUSIVE", 1.31e-2, (
                "about 14 more prompts would decide (PASS)")  # fmt: skip
        rows.append(row(clause="S2", slice=f"domain={domain}", value=value, lower=lower,
                        upper=upper, limit=limit, n_prompts=18, n_tokens=840, verdict=verdict,
                        detail=detail, method="betting, ceiling 0.02",
                        p_fail=0.004 if verdict == "FAIL" else 1.0))  # fmt: skip
    rows += [
        row(clause="S3", metric="mult_prob_error", value=1.0402, lower=1.0351, upper=1.0467,
            limit=1.05, warn=True, unit="x", noise_floor=1.0, method="betting, ceiling 1.1"),
        row(clause="S4", metric="flip_rate", value=0.0301, lower=0.0226, upper=0.0413, limit=0.05,
            unit="", noise_floor=0.0, method="betting, ceiling 0.25"),
        row(clause="S5", slice="decided", metric="flip_rate", value=2.1e-4, lower=0.0,
            upper=7.9e-3, limit=0.01, unit="", noise_floor=0.0, n_tokens=4630,
            method="betting, ceiling 0.05"),
        row(clause="S6", metric="policy_gradient_bias", value=None, lower=None, upper=None,
            limit=0.05, n_prompts=0, n_tokens=0, verdict="UNOBSERVED", unit="", path="",
            detail="the gradient was not measured", noise_floor=None, method="", p_fail=None),
        row(clause="R1", slice="probe prefill_decode", metric="kl", section="runtime", value=0.0,
            lower=0.0, upper=4.2e-4, n_tokens=5880, path="", noise_floor=None),
        row(clause="R2", slice="probe batch_invariance", metric="kl", section="runtime",
            value=1.6e-3, lower=7.0e-4, upper=8.7e-3, limit=1.0e-2, n_prompts=16, n_tokens=256,
            path="", noise_floor=None, method="betting, ceiling 0.02"),
        row(clause="O1", metric="missing", section="observability", value=0.0, lower=None,
            upper=None, limit=0.0, n_tokens=11760, noise_floor=None, method="exact", unit="",
            path="", p_fail=None),
    ]  # fmt: skip
    return rows


def worst_token(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "prompt_id": "creative-07",
        "domain": "creative",
        "position": 12,
        "path": "decode",
        "before": "assistant\nThe old lighthouse keeper climbed the stairs and looked out over the",
        "token": " sea",
        "reference_top": " ocean",
        "engine_top": " sea",
        "reference_top_prob": 0.331,
        "engine_top_prob": 0.4127,
        "reference_prob": 0.3215,
        "engine_prob": 0.4127,
        "kl": 0.0412,
        "margin": 0.0291,
        "flip": True,
    }
    return base | changes


def worst_tokens() -> list[dict[str, Any]]:
    """Spaces, newlines, several scripts, a token that is not the first choice of either side."""
    return [
        worst_token(),
        worst_token(prompt_id="multilingual-11", domain="multilingual", position=3,
                    before="assistant\n東京は日本の", token="首都", reference_top="首都",
                    engine_top="首", reference_top_prob=0.5121, engine_top_prob=0.4402,
                    reference_prob=0.5121, engine_prob=0.4019, kl=0.0388, margin=0.117),
        worst_token(prompt_id="code-02", domain="code", position=31, path="prefill",
                    before="def fib(n):\n    if n < 2:\n        return", token="\n",
                    reference_top=" n", engine_top=" n", reference_top_prob=0.9312,
                    engine_top_prob=0.9021, reference_prob=0.0007, engine_prob=0.0013,
                    kl=0.0207, margin=3.1, flip=False),
        worst_token(prompt_id="long-04", domain="long", position=0, before="assistant\n",
                    token="The", reference_top="The", engine_top="In", reference_top_prob=0.287,
                    engine_top_prob=0.301, reference_prob=0.287, engine_prob=0.262, kl=0.0164,
                    margin=0.012),
        worst_token(prompt_id="arithmetic-12", domain="arithmetic", position=8,
                    before="17 + 26 = ", token="4", reference_top="4", engine_top="4",
                    reference_top_prob=0.994, engine_top_prob=0.989, reference_prob=0.994,
                    engine_prob=0.989, kl=0.0151, margin=5.2, flip=False),
    ]  # fmt: skip


def views(worst: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    rng = random.Random(7)
    edges = [0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, None]
    rates = [0.41, 0.22, 0.09, 0.021, 0.0016, 0.0, 0.0, 0.0]
    sizes = [161, 170, 460, 640, 980, 1210, 1320, 939]
    flips = [
        {"lo": lo, "hi": hi, "n": n, "rate": rate, "lower": max(0.0, rate - 2 * _se(rate, n)),
         "upper": min(1.0, rate + 2 * _se(rate, n) + 3 / n)}
        for lo, hi, rate, n in zip(edges, edges[1:], rates, sizes, strict=False)
    ]  # fmt: skip
    positions = [
        {"lo": 3.0 * i, "hi": 3.0 * i + 3, "n": 378 - 6 * i, "mean": 1e-3 + 6e-4 * rng.random(),
         "p95": 6e-3 + 4e-3 * rng.random()}
        for i in range(16)
    ]  # fmt: skip
    bins = [0.0, 0.01, 0.1, 0.5, 0.9, 1.0]
    gaps = [0.110, 0.097, 0.069, 0.028, 0.0008]
    probabilities = [
        {"lo": lo, "hi": hi, "n": n, "mean": kl, "mean_abs_dlp": gap}
        for lo, hi, n, kl, gap in zip(bins, bins[1:], [190, 510, 1350, 1430, 2400],
                                      [4.1e-3, 3.6e-3, 2.7e-3, 1.3e-3, 1.1e-4], gaps, strict=False)
    ]  # fmt: skip
    reference = [round(min(0.0, -rng.expovariate(0.7)), 4) for _ in range(600)]
    engine = [round(min(0.0, v + rng.gauss(0, 0.04 * math.sqrt(1 - v))), 4) for v in reference]
    return {
        "flip_by_margin": flips,
        "kl_by_position": positions,
        "kl_by_reference_prob": probabilities,
        "logprob_scatter": {"reference": reference, "engine": engine},
        "worst_tokens": worst_tokens() if worst is None else worst,
        "probes": [
            {"probe": probe, "metric": metric, "value": value, "n_prompts": n, "n_tokens": 16 * n}
            for probe, n, kl, gap, flip in (
                ("batch_invariance", 16, 1.6e-3, 0.0374, 0.027),
                ("order", 32, 0.0, 0.0, 0.0),
                ("prefill_decode", 126, 0.0, 0.0, 0.0),
                ("repetition", 32, 0.0, 0.0, 0.0),
            )
            for metric, value in (("kl", kl), ("abs_dlp", gap), ("flip_rate", flip))
        ],
    }


def _se(rate: float, n: int) -> float:
    return math.sqrt(rate * (1 - rate) / n)


def _link(quantity: str, formula: str, bound: float, *, measured: float | None = None,
          upper: float | None = None, vacuous: bool = False,
          horizon: float | None = None) -> dict[str, Any]:  # fmt: skip
    return {
        "quantity": quantity, "measured": measured, "upper": upper, "bound": bound,
        "slack": bound / measured if measured else None, "vacuous": vacuous,
        "useful_horizon": horizon, "formula": formula,
    }  # fmt: skip


def chains() -> list[dict[str, Any]]:
    rms = [
        _link("KL(q||p) a token", "measured; upper bound used below", 1.83e-3, measured=1.41e-3,
              upper=1.83e-3),
        _link("TV a token", "sqrt(KL/2)", 0.0302, measured=0.0176),
        _link("KL of 60 tokens", "T KL", 0.1098),
        _link("TV of 60 tokens", "min(sqrt(T KL/2), sqrt(1-e^-T KL))", 0.2343, horizon=68.3),
        _link("reward drift", "range(R) TV_seq", 0.2343, horizon=68.3),
        _link("gradient bias, in T F", "2 TV_seq", 0.4686),
    ]  # fmt: skip
    sup = [
        _link("largest drift on the nucleus", "measured", 1.94, measured=1.94),
        _link("TV a token", "(1-tail) tanh(D/4) + tail", 0.451, measured=0.121),
        _link("KL a token", "K(D)", 0.448, measured=0.0412),
        _link("TV of 60 tokens", "sqrt(1 - sech^2T(D/4))", 1.0, vacuous=True, horizon=0.27),
        _link("reward drift", "range(R) TV_seq", 1.0, vacuous=True, horizon=0.27),
        _link("natural-gradient bias, in A_max", "sqrt(cosh^2T(D/2) - 1)", math.inf, vacuous=True),
    ]  # fmt: skip
    return [
        {"slice": name, "route": route, "rows": rows}
        for name in ("all", "domain=code", "domain=multilingual")
        for route, rows in (("rms", rms), ("sup", sup))
    ]


def identities() -> dict[str, dict[str, Any]]:
    same = {"model": "/data/models/SmolLM2-135M-Instruct", "weights": DIGEST,
            "tokenizer": DIGEST[::-1], "vocab_size": 49152}  # fmt: skip
    return {
        "reference": same | {
            "program": "transformers", "version": "5.19.0", "torch": "2.13.0", "dtype": "float32",
            "head_dtype": "float32", "device": "cpu", "attention": "sdpa", "padding": "right",
            "token_budget": 2048,
        },
        "engine": same | {
            "program": "vllm", "version": "0.32.0", "torch": "2.13.0", "dtype": "bfloat16",
            "head_dtype": "bfloat16", "runner": "V1", "kv_cache_dtype": ["auto"] * 30,
            "attention": ["CPUAttentionBackendImpl"], "logprobs_mode": "raw_logprobs",
            "quantization": None, "requested": {}, "unrepresentable_weights": 0.0,
            "route": "hidden_states", "head_check": 0.031,
            "sampling": {"max_tokens": 48, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0},
        },
    }  # fmt: skip


def findings() -> list[dict[str, Any]]:
    return [
        {"code": "SLICE_OUTLIER", "title": "domain=multilingual drifts 12x the mean of the others",
         "severity": "error",
         "evidence": [{"prompt_id": "multilingual-11", "kl": 0.0388, "position": 3},
                      {"prompt_id": "multilingual-04", "kl": 0.0312, "position": 17}],
         "remedy": "Serve this domain from the reference until the cause is known.",
         "clause": "S2", "slice": "domain=multilingual"},
        {"code": "BATCH_VARIANT", "title": "a lone request is served from other numbers than a "
         "batched one (KL 0.0016)", "severity": "note",
         "evidence": [{"prompts": 16, "mean_kl": 1.6e-3}],
         "remedy": "Use a batch-invariant mode where the engine has one, or audit at the batch "
         "sizes that you serve."},
    ]  # fmt: skip


def document(verdict: str = "FAIL", **changes: Any) -> dict[str, Any]:
    """A record's document. verdict PASS, INCONCLUSIVE and NOT_COMPARABLE drop the rows that
    contradict it."""
    rows = measurements()
    if verdict == "PASS":
        rows = [m for m in rows if m["verdict"] == "PASS"]
    elif verdict in {"INCONCLUSIVE", "UNOBSERVED"}:
        rows = [m for m in rows if m["verdict"] in {"PASS", verdict}]
    elif verdict == "NOT_COMPARABLE":
        rows = []
    failed = verdict == "FAIL"
    action = {"action": "route", "to": "reference", "slice": "domain=multilingual",
              "clause": "S2", "verdict": "FAIL", "description": ""}  # fmt: skip
    base = {
        "schema_version": "1.0",
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "started": "2025-03-01T10:00:00+00:00",
        "finished": "2025-03-01T10:02:41+00:00",
        "contract": {"name": "bf16-serving", "digest": DIGEST[::-1], "document": {
            "schema": "kernel-contracts/v1", "name": "bf16-serving",
            "description": "bfloat16 serving stays within a stated reward and flip budget.",
            "alpha": 0.05}},
        "identities": identities(),
        "counts": {"prompts": 126, "sequences": 126, "tokens": 5880},
        "measurements": rows,
        "findings": findings() if failed else [],
        "actions": [action] if failed else [],
        "chain": [] if verdict == "NOT_COMPARABLE" else chains(),
        "views": {} if verdict == "NOT_COMPARABLE" else views(),
        "environment": {"mismatch_audit": "0.1.0", "python": "3.11.9", "system": "Linux x86_64",
                        "cores": 2, "cuda": None},
        "digests": {"prompts": DIGEST, "settings": DIGEST[::-1]},
        "timings": {"load": 21.4, "prompts": 96.2, "probes": 31.0, "verdicts": 1.2},
    }  # fmt: skip
    if verdict == "NOT_COMPARABLE":
        base["findings"] = [
            {
                "code": "NOT_COMPARABLE",
                "title": "weights: reference 5af571cb, engine 91ab02cd",
                "severity": "error",
                "evidence": [],
                "remedy": "Serve the same checkpoint.",
            }
        ]
    return base | changes


def record(verdict: str = "FAIL", **changes: Any) -> Record:
    return Record.model_validate(document(verdict, **changes))


def many_slices(n: int = 60) -> Record:
    """One clause on ``n`` slices, the last failing, the one before inconclusive."""
    rows = [
        row(clause="S2", slice=f"topic={i:03d}", limit=1e-2, n_prompts=20, n_tokens=900,
            value=1e-3 + 1e-5 * i, upper=3e-3 + 1e-5 * i,
            verdict="FAIL" if i == n - 1 else "INCONCLUSIVE" if i == n - 2 else "PASS",
            detail="about 30 more prompts would decide (PASS)" if i == n - 2 else "")
        for i in range(n)
    ]  # fmt: skip
    return record(measurements=[row(), *rows])


def hostile() -> Record:
    """Hostile text in every place that a prompt, a model, a file or a setting can reach."""
    bad = list(HOSTILE)
    text = document()
    text["measurements"] = [
        row(clause=bad[i % 10], slice=bad[(i + 3) % 10], metric=bad[(i + 5) % 10],
            detail=bad[(i + 7) % 10], method=bad[i % 10], unit=bad[(i + 1) % 10],
            path=bad[(i + 2) % 10], verdict="FAIL" if i % 2 else "INCONCLUSIVE")
        for i in range(10)
    ]  # fmt: skip
    text["findings"] = [
        {"code": t, "title": t, "severity": "error", "remedy": t, "clause": t, "slice": t,
         "evidence": [{t: t, "nested": {t: [t]}}]}
        for t in bad
    ]  # fmt: skip
    text["actions"] = [{"action": t, "to": t, "slice": t, "clause": t, "verdict": t} for t in bad]
    text["views"] = views([
        worst_token(prompt_id=t, domain=t, path=t, before=t, token=t, reference_top=t, engine_top=t)
        for t in bad
    ])  # fmt: skip
    text["views"]["probes"] = [
        {"probe": t, "metric": t, "value": 1.0, "n_prompts": 1, "n_tokens": 1, "detail": t}
        for t in bad
    ]
    for chain, t in zip(text["chain"], bad, strict=False):
        chain["slice"] = t
        chain["rows"] = [one | {"quantity": t, "formula": t} for one in chain["rows"]]
    joined = " ".join(bad)
    text["contract"] = {"name": joined, "digest": joined, "document": {joined: [joined]}}
    text["identities"] = {
        side: facts | {"model": joined, "version": joined, joined: {joined: joined}}
        for side, facts in identities().items()
    }
    text["environment"] = {joined: joined}
    text["digests"] = {joined: joined}
    text["timings"] = {joined: 1.0}
    return Record.model_validate(text)
