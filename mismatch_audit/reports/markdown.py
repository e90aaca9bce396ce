"""The record as Markdown, for a step summary or a comment on a change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mismatch_audit.reports.advice import SYMBOLS, WORDS, next_steps, summary
from mismatch_audit.reports.escape import markdown, markdown_line, quoted, shortened, visible
from mismatch_audit.reports.gradient_table import HEAD, gradient_rows
from mismatch_audit.reports.grouping import clause_groups
from mismatch_audit.reports.identity_table import identity_rows
from mismatch_audit.reports.notation import (
    clause_title,
    fact,
    interval,
    limit,
    number,
    probability,
    quantity,
    short_digest,
    when,
)
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rows import MeasurementRow, WorstToken

_CELL = 160
_CONTEXT = 60
_TOKENS = 6
_FINDINGS = 10


def render_markdown(record: Record) -> str:
    """The report in GitHub's Markdown. Bounded: many passing slices are folded into one line."""
    blocks = [
        f"### {SYMBOLS[record.verdict]} {WORDS[record.verdict]}: {_text(record.contract.name)}",
        markdown(summary(record)),
        *_next(record),
        *_verdicts(record),
        *_findings(record),
        *_worst(record),
        *_gradient(record),
        *_programs(record),
        f"Contract {_text(short_digest(record.contract.digest))}, {markdown(when(record))}; "
        f"exit code {record.exit_code}.",
    ]
    return "\n\n".join(blocks) + "\n"


def _text(text: str, width: int = _CELL) -> str:
    """Foreign text, cut before it is escaped, so that no escape is cut in two."""
    return markdown(shortened(visible(text), width))


def _line(text: str, width: int = _CELL) -> str:
    return markdown_line(shortened(visible(text), width))


def _table(head: Sequence[str], right: Sequence[int], rows: Iterable[Sequence[str]]) -> str:
    rule = ["--:" if i in right else "---" for i in range(len(head))]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _next(record: Record) -> list[str]:
    steps = next_steps(record)
    if not steps:
        return []
    return ["\n".join(f"{i}. {_line(step, 400)}" for i, step in enumerate(steps, 1))]


def _verdicts(record: Record) -> list[str]:
    if not record.measurements:
        return []
    rows: list[list[str]] = []
    for group in clause_groups(record):
        rows += [_verdict_row(row) for row in group.rows]
        if group.folded:
            rows.append([_text(group.clause), markdown(group.folded), *[""] * 6])
    head = ["clause", "slice", "measures", "value", "bounds", "limit", "prompts", "verdict"]
    return [_table(head, (3, 4, 5, 6), rows)]


def _verdict_row(row: MeasurementRow) -> list[str]:
    verdict = f"{SYMBOLS[row.verdict]} {WORDS[row.verdict]}"
    if row.verdict != "PASS":
        verdict = f"**{verdict}**"
    if row.warn:
        verdict += " (warn)"
    if row.detail:
        verdict += f": {_text(row.detail)}"
    return [
        _text(row.clause),
        _text(row.slice),
        _text(clause_title(row)),
        markdown(quantity(row, row.value)),
        markdown(interval(row)),
        markdown(limit(row)),
        f"{row.n_prompts:,}",
        verdict,
    ]


def _findings(record: Record) -> list[str]:
    if not record.findings:
        return []
    lines = []
    for finding in record.findings[:_FINDINGS]:
        place = " on ".join(_text(t) for t in (finding.clause, finding.slice) if t)
        lines.append(
            f"- **{_text(finding.code)}** ({finding.severity}{', ' if place else ''}{place}): "
            f"{_text(finding.title)}. {_text(finding.remedy, 400)}"
        )
        lines += [f"  - {_line(fact(row))}" for row in finding.evidence[:2]]
    if len(record.findings) > _FINDINGS:
        lines.append(f"- {len(record.findings) - _FINDINGS} more in report.html")
    return ["#### Findings", "\n".join(lines)]


def _worst(record: Record) -> list[str]:
    if not record.views.worst_tokens:
        return []
    head = ["prompt", "position", "text", "reference's first", "engine's first", "token's p",
            "KL", "margin"]  # fmt: skip
    rows = [_token_row(token) for token in record.views.worst_tokens[:_TOKENS]]
    return ["#### Worst tokens", _table(head, (1, 6, 7), rows)]


def _token_row(token: WorstToken) -> list[str]:
    before = markdown(shortened(visible(token.before), _CONTEXT, tail=True))
    return [
        _text(token.prompt_id),
        f"{token.position} {_text(token.path)}",
        f"{before} **{_text(quoted(token.token), _CONTEXT)}**",
        f"{_text(quoted(token.reference_top), _CONTEXT)} {_p(token.reference_top_prob)}",
        f"{_text(quoted(token.engine_top), _CONTEXT)} {_p(token.engine_top_prob)}",
        f"{_p(token.reference_prob)} / {_p(token.engine_prob)}",
        markdown(number(token.kl)),
        markdown(number(token.margin)) + (" flip" if token.flip else ""),
    ]


def _p(value: float | None) -> str:
    return markdown(probability(value))


def _gradient(record: Record) -> list[str]:
    rows = [[_text(cell) for cell in row] for row in gradient_rows(record.gradient)]
    return ["#### Policy gradient", _table(HEAD, (2, 3, 4, 5, 6), rows)] if rows else []


def _programs(record: Record) -> list[str]:
    rows = [
        [markdown(row.name), _text(row.reference), _text(row.engine) + (" ≠" * row.differs)]
        for row in identity_rows(record.identities)
    ]
    if not rows:
        return []
    table = _table(["", "reference", "engine"], (), rows)
    return [f"<details><summary>Programs</summary>\n\n{table}\n\n</details>"]
