"""What the record says in words: one summary, and the next thing to do. Adds no facts."""

from __future__ import annotations

import re

from mismatch_audit.reports.escape import visible
from mismatch_audit.reports.notation import (
    clause_title,
    count,
    limit,
    metric_title,
    number,
    plural,
    quantity,
)
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rows import MeasurementRow

SYMBOLS = {
    "PASS": "✔",
    "FAIL": "✘",
    "INCONCLUSIVE": "?",
    "UNOBSERVED": "○",
    "UNSOUND": "!",
    "NOT_COMPARABLE": "≠",
    "ACKNOWLEDGED": "~",
}
WORDS = {name: name.replace("_", " ") for name in SYMBOLS}
HEADLINES = {
    "PASS": "The engine kept every promise of the contract.",
    "ACKNOWLEDGED": "The engine breaks the contract only where somebody answers for it.",
    "FAIL": "The engine breaks the contract.",
    "INCONCLUSIVE": "The evidence decides neither way.",
    "UNOBSERVED": "Evidence is missing, and that is never a pass.",
    "UNSOUND": "The contract failed its own self-test, so its verdicts mean nothing.",
    "NOT_COMPARABLE": "The two programs do not evaluate the same policy: no drift is reported.",
}
_ORDER = ("UNSOUND", "FAIL", "UNOBSERVED", "INCONCLUSIVE", "ACKNOWLEDGED", "PASS")
_MORE = re.compile(r"about (\d+) more prompts? would decide")
_MOST = 6


def by_verdict(record: Record, verdict: str) -> list[MeasurementRow]:
    """The rows with this verdict, furthest beyond their limit first. Of optional slices only those
    that count."""
    rows = [
        m
        for m in record.measurements
        if m.verdict == verdict and not (m.optional and verdict in ("UNOBSERVED", "INCONCLUSIVE"))
    ]
    return sorted(rows, key=_excess, reverse=True)


def _excess(row: MeasurementRow) -> float:
    """How many times its limit a row measures; 0 where that means nothing."""
    if row.value is None or row.limit is None:
        return 0.0
    if row.metric == "ess_ratio":
        return row.limit / row.value if row.value > 0 else float("inf")
    return row.value / row.limit if row.limit > 0 else (float("inf") if row.value > 0 else 0.0)


def tally(record: Record) -> dict[str, int]:
    """Verdict -> rows, worst first, without the zeros."""
    found = {v: sum(m.verdict == v for m in record.measurements) for v in _ORDER}
    return {verdict: n for verdict, n in found.items() if n}


def place(row: MeasurementRow) -> str:
    """``S2 on domain=code``."""
    return visible(f"{row.clause} on {row.slice}")


def against_limit(row: MeasurementRow) -> str:
    """``KL(...) 3.1e-3, limit 2.0e-3``."""
    told = "" if row.limit is None else f", limit {limit(row, sign=False)}"
    return f"{metric_title(row.metric)} {quantity(row, row.value)}{told}"


def summary(record: Record) -> str:
    """The outcome in two or three plain sentences."""
    known = record.verdict == "PASS" and by_verdict(record, "ACKNOWLEDGED")
    parts = [HEADLINES["ACKNOWLEDGED" if known else record.verdict]]
    if record.rollouts is not None:
        parts = [rollout_headline(record) or parts[0]]
    found = tally(record)
    if found:
        told = ", ".join(f"{count(n)} {WORDS[v]}" for v, n in found.items())
        total = sum(found.values())
        parts.append(
            f"{plural(total, 'check')} (a clause on a slice): {told}, over "
            f"{plural(record.counts.prompts, 'prompt')} and "
            f"{plural(record.counts.tokens, 'response token')}."
        )
    worst = by_verdict(record, "FAIL")
    if worst:
        parts.append(f"Furthest beyond its limit: {place(worst[0])}, {against_limit(worst[0])}.")
    warned = sum(m.warn for m in record.measurements if m.verdict == "PASS")
    if warned:
        verb = "passes" if warned == 1 else "pass"
        parts.append(f"{plural(warned, 'check')} {verb} above the warning level.")
    return " ".join(parts)


def rollout_headline(record: Record) -> str:
    """What a check of recorded rollouts found, where that decides; else nothing."""
    first = next((f for f in record.findings if f.severity == "error"), None)
    if first is None:
        return ""
    if record.verdict == "NOT_COMPARABLE":
        return (
            f"The two columns are not log-probs of one policy at one token ({first.code}): no "
            "drift is reported."
        )
    broken = any(m.verdict == "FAIL" for m in record.measurements)
    return "" if broken else f"A check found a fault: {first.code}."


def next_steps(record: Record) -> list[str]:
    """What to do now, most urgent first. Plain text, safe to show on a terminal."""
    steps: list[str] = []
    if record.verdict == "NOT_COMPARABLE" or (record.rollouts and rollout_headline(record)):
        steps += [f.remedy for f in record.findings if f.severity == "error"]
    if record.rollouts is not None:
        steps += [f"Could not be read: {s.error}" for s in record.rollouts.damaged]
    if record.verdict == "NOT_COMPARABLE":
        steps = steps or ["Compare the identities above; audit again once they agree."]
    if record.verdict == "UNSOUND":
        steps.append("Run `audit contract selftest` and mend the contract before any decision.")
    steps += _escalation(record)
    steps += _failures(record)
    steps += _unobserved(record)
    steps += _inconclusive(record)
    if record.verdict == "PASS":
        steps += _passed(record)
    return [visible(step) for step in dict.fromkeys(steps)][:_MOST]


def _escalation(record: Record) -> list[str]:
    """One line per action that the contract asks for, with all that asked."""
    asked: dict[tuple[str, str], list[str]] = {}
    for action in record.actions:
        name, to = str(action.get("action", "")), str(action.get("to") or "")
        who = f"{action.get('clause')} {action.get('verdict')}"
        where = f" on {action.get('slice')}" if action.get("slice") else ""
        asked.setdefault((name, to), []).append(who + where)
    lines = []
    for (name, to), askers in asked.items():
        more = f" and {len(askers) - 3} more" if len(askers) > 3 else ""
        target = f" to {to}" if to else ""
        lines.append(f"The contract asks: {name}{target} ({'; '.join(askers[:3])}{more}).")
    return lines


def _failures(record: Record) -> list[str]:
    failed = by_verdict(record, "FAIL")
    if not failed:
        return []
    steps = list(_ablations(record, failed))
    whole = {m.clause for m in failed if m.slice == "all"}
    narrow = [m for m in failed if m.slice != "all" and m.section in {"statistical", "numerical"}]
    narrow = [m for m in narrow if m.clause not in whole]
    if narrow and not whole and not any(a.get("action") == "route" for a in record.actions):
        names = list(dict.fromkeys(m.slice for m in narrow))
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        steps.append(f"Only some slices fail: route {', '.join(names[:4])}{more} to the reference.")
    return steps


def _ablations(record: Record, failed: list[MeasurementRow]) -> list[str]:
    """One setting to change, by what the engine says it runs."""
    engine, reference = record.identities.engine, record.identities.reference
    steps = []
    if any(m.metric == "nonfinite" for m in failed):
        steps.append("Non-finite logits come first: look at the engine's log and its weights.")
    if any(m.section == "runtime" for m in failed):
        probes = sorted({m.slice.removeprefix("probe ") for m in failed if m.section == "runtime"})
        steps.append(
            f"The engine differs from itself ({', '.join(probes)}): try its batch-invariant mode, "
            "or audit at the batch sizes that you serve."
        )
    cache = " ".join(map(str, _listed(engine.get("kv_cache_dtype"))))
    if "fp8" in cache or "int8" in cache:
        steps.append(f"The KV cache is {cache}: try --engine-arg kv_cache_dtype=auto first.")
    if engine.get("quantization"):
        steps.append(f"Weights are quantised ({engine['quantization']}): serve them plain once.")
    if engine.get("weights") != reference.get("weights"):
        steps.append("The served weights are not the reference's: push them again.")
    share = engine.get("unrepresentable_weights")
    if isinstance(share, float) and share > 0:
        steps.append(
            "The engine holds a rounded copy of the weights: audit the exported copy on both "
            "sides to tell rounding from kernels."
        )
    if engine.get("dtype") in {"bfloat16", "float16"}:
        if engine.get("head_dtype") != "float32" and engine.get("program") == "vllm":
            steps.append(
                "Try the output head in float32: --engine-arg 'hf_overrides={head_dtype: float32}'."
            )
        steps.append(
            "To tell precision from a fault: audit with --engine-dtype float32 and a contract for "
            "it (samples/contracts/fp32-exact.yaml). Drift that stays is no rounding."
        )
    return steps


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _unobserved(record: Record) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for m in by_verdict(record, "UNOBSERVED"):
        reasons.setdefault(m.detail or "no evidence", []).append(place(m))
    lines = []
    for reason, places in list(reasons.items())[:3]:
        more = f" and {len(places) - 2} more" if len(places) > 2 else ""
        lines.append(f"No verdict for {', '.join(places[:2])}{more}: {reason}.")
    return lines


def _inconclusive(record: Record) -> list[str]:
    rows = by_verdict(record, "INCONCLUSIVE")
    if not rows:
        return []
    needs = [(int(found[1]), m) for m in rows if (found := _MORE.search(m.detail))]
    stuck = [m for m in rows if not _MORE.search(m.detail)]
    lines = []
    if needs:
        most, row = max(needs, key=lambda pair: pair[0])
        few = plural(len(needs), "check")
        lines.append(
            f"About {count(most)} more prompts would decide {place(row)}"
            + (f", the hardest of {few}." if len(needs) > 1 else ".")
        )
    if stuck:
        row = stuck[0]
        why = f" ({row.detail})" if row.detail else ""
        lines.append(
            f"{place(row)}{why}: {against_limit(row)}. More prompts will not help soon; "
            "lower the drift or change the limit for a reason of its own."
        )
    return lines


def _passed(record: Record) -> list[str]:
    warned = [m for m in record.measurements if m.warn]
    lines = [
        f"{place(m)} passes above its warning level: {quantity(m, m.value)} of "
        f"{limit(m, sign=False)} ({clause_title(m)})."
        for m in warned[:3]
    ]
    lines.append(
        "Keep report.json with the release; audit again after any change of weights, engine "
        "build or engine settings."
    )
    return lines


def horizon_note(horizon: float | None) -> str:
    """Up to which response length a bound says something."""
    if horizon is None:
        return ""
    if horizon < 1:
        return "not one token"
    return plural(int(horizon), "token") if horizon < 1e6 else f"{number(horizon)} tokens"
