"""The sections of the terminal report, top to bottom."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from mismatch_audit.reports.advice import SYMBOLS, WORDS, horizon_note, next_steps, summary
from mismatch_audit.reports.escape import quoted, visible
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
    times,
    when,
)
from mismatch_audit.reports.record import REPORT_NAME, Record
from mismatch_audit.reports.rows import Chain, WorstToken
from mismatch_audit.reports.terminal_lines import STYLES, Column, Page, cut, pad, verdict_text

_SEVERITY = {"error": "FAIL", "warning": "INCONCLUSIVE", "note": ""}
_WORST = 5
_FINDINGS = 8


def banner(page: Page, record: Record) -> None:
    """Verdict, contract, model, size of the run."""
    verdict = record.verdict
    word = f" {SYMBOLS[verdict]} {WORDS[verdict]} "
    line = Text().append(word, style=f"{STYLES[verdict]} reverse")
    model = _model(record)
    line.append(f"  {visible(record.contract.name)}", style="bold")
    line.append(f"  on {visible(model)}" if model else "")
    page.line(line)
    page.note(summary(record), indent=0)


def _model(record: Record) -> str:
    named = [row for row in identity_rows(record.identities) if row.name == "model"]
    return named[0].engine if named else ""


def identity_list(page: Page, record: Record) -> None:
    """Both programs side by side; ≠ where they ought to be alike and are not."""
    rows = identity_rows(record.identities)
    if not rows:
        return
    page.heading("programs")
    half = (page.width - 18 - 6) // 2
    columns = [Column("", 18), Column("", half), Column("", half)]
    page.row(columns, ["", Text("reference", "dim"), Text("engine", "dim")])
    for row in rows:
        engine = Text(visible(row.engine))
        if row.differs:
            engine = Text(f"≠ {visible(row.engine)}", style="bold yellow")
        page.row(columns, [Text(f"  {row.name}", "dim"), row.reference, engine])


def _columns(page: Page) -> list[Column]:
    """The slice's column takes what the numbers leave; narrow terminals lose the noise floor."""
    fixed = [
        Column("value", 8, right=True),
        Column("95 % bounds", 17, right=True),
        Column("limit", 9, right=True),
        Column("floor", 7, right=True),
        Column("prompts", 7, right=True),
        Column("verdict", 14),
    ]
    if page.width < 90:
        fixed.pop(3)
    rest = page.width - sum(c.width + 2 for c in fixed) - 2
    return [Column("  slice", max(10, rest)), *fixed]


def verdict_table(page: Page, record: Record) -> None:
    """Every clause with its slices, and why a row did not pass."""
    if not record.measurements:
        return
    page.heading("verdicts")
    columns = _columns(page)
    floor = any(c.title == "floor" for c in columns)
    alpha = record.contract.document.get("alpha", 0.05)
    level = f"{100 * (1 - alpha):g} % bounds" if isinstance(alpha, float) else "bounds"
    titles = [level if c.title == "95 % bounds" else c.title for c in columns]
    page.row(columns, [Text(t, "dim") for t in titles])
    for group in clause_groups(record):
        first = group.rows[0]
        page.line(
            Text.assemble((visible(group.clause), "bold"), "  ", visible(clause_title(first)))
        )
        for row in group.rows:
            cells: list[Text | str] = [
                f"  {visible(row.slice)}",
                quantity(row, row.value),
                interval(row),
                limit(row),
                number(row.noise_floor),
                f"{row.n_prompts:,}",
                verdict_text(row.verdict, warn=row.warn),
            ]
            if not floor:
                cells.pop(4)
            if cell_len(visible(row.slice)) > columns[0].width - 2:
                page.line(cells[0])
                cells[0] = ""
            page.row(columns, cells)
            if row.detail:
                page.note(row.detail, indent=6, style="dim", first="    →")
        if group.folded:
            page.line(Text(f"  {group.folded}", style="dim"))


def worst_list(page: Page, record: Record) -> None:
    """The tokens with the largest KL, with the text that led there."""
    tokens = record.views.worst_tokens
    if not tokens:
        return
    page.heading("worst tokens")
    for token in tokens[:_WORST]:
        _worst(page, token)
    if len(tokens) > _WORST:
        page.line(Text(f"  {len(tokens) - _WORST} more in report.html", style="dim"))


def _worst(page: Page, token: WorstToken) -> None:
    head = Text("  ").append(visible(token.prompt_id), style="bold")
    where = [f"position {token.position}", token.path]
    if token.domain and not token.prompt_id.startswith(token.domain):
        where.insert(0, token.domain)
    head.append(f"  {visible(', '.join(where))}")
    head.append(f"   KL {number(token.kl)}   margin {number(token.margin)}")
    if token.flip:
        head.append("   flip", style="bold yellow")
    page.line(head)
    shown = quoted(token.token)
    room = page.width - 10 - len(shown)
    before = cut(visible(token.before), max(10, min(room, 70)), tail=True)
    page.line(Text.assemble("    ", (before, "dim"), " ", (shown, "bold")))
    page.line(
        f"    {pad('token', 14)}{shown}: reference {probability(token.reference_prob)}, "
        f"engine {probability(token.engine_prob)}"
    )
    page.line(
        f"    {pad('first choice', 14)}reference {quoted(token.reference_top)} "
        f"{probability(token.reference_top_prob)}, engine {quoted(token.engine_top)} "
        f"{probability(token.engine_top_prob)}"
    )


def chain_table(page: Page, record: Record) -> None:
    """Drift to reward and gradient on the widest slice, both routes."""
    if not record.chain:
        return
    name = record.chain[0].slice
    page.heading("what the drift implies")
    others = len({c.slice for c in record.chain}) - 1
    more = f"; {others} more slices in report.html" if others else ""
    page.line(Text(f"  slice {visible(name)}{more}", style="dim"))
    columns = [
        Column("", 36 if page.width >= 96 else 24),
        Column("measured", 8, right=True),
        Column("upper", 8, right=True),
        Column("bound", 8, right=True),
        Column("slack", 6, right=True),
        Column("useful up to", 24 if page.width >= 96 else 22),
    ]
    page.row(columns, ["", *(Text(c.title, "dim") for c in columns[1:])])
    for chain in record.chain:
        if chain.slice == name:
            _route(page, columns, chain)


def _route(page: Page, columns: list[Column], chain: Chain) -> None:
    titles = {"rms": "by the mean KL", "sup": "by the largest drift"}
    page.line(Text(f"  {titles[chain.route]}", style="bold"))
    for link in chain.rows:
        note = Text()
        if link.vacuous:
            note.append("VACUOUS", style="yellow")
        horizon = horizon_note(link.useful_horizon)
        note.append(f" ({horizon})" if link.vacuous and horizon else horizon)
        page.row(
            columns,
            [f"    {visible(link.quantity)}", number(link.measured), number(link.upper),
             number(link.bound), times(link.slack), note],
        )  # fmt: skip


def gradient_list(page: Page, record: Record) -> None:
    """The measured policy-gradient bias, with what each correction does to it."""
    rows = gradient_rows(record.gradient)
    if not rows:
        return
    page.heading("policy gradient")
    head = list(HEAD)
    while True:  # the last columns give way on a narrow terminal
        widths = [max(len(visible(row[i])) for row in [head, *rows]) for i in range(len(head))]
        spare = page.width - 2 - sum(w + 2 for w in widths[1:])
        if spare >= min(widths[0], 12) or len(head) <= 4:
            break
        head.pop()
    widths[0] = max(8, min(widths[0], spare))
    columns = [Column(t, w, right=i > 1) for i, (t, w) in enumerate(zip(head, widths, strict=True))]
    page.row(columns, [Text(t, "dim") for t in head])
    for row in rows:
        page.row(columns, row[: len(head)])


def finding_list(page: Page, record: Record) -> None:
    """Coded causes with their remedy and the first rows that show them."""
    if not record.findings:
        return
    page.heading("findings")
    for finding in record.findings[:_FINDINGS]:
        style = STYLES.get(_SEVERITY[finding.severity], "")
        place = " on ".join(visible(t) for t in (finding.clause, finding.slice) if t)
        line = Text("  ").append(f"{finding.severity:<8}", style=style)
        line.append(f"{visible(finding.code)}", style="bold").append(f"  {place}", style="dim")
        page.line(line)
        page.note(finding.title, indent=10)
        page.note(finding.remedy, indent=12, first="          →")
        for row in finding.evidence[:2]:
            page.line(Text(f"          {visible(fact(row))}", style="dim"))
    if len(record.findings) > _FINDINGS:
        page.line(Text(f"  {len(record.findings) - _FINDINGS} more in report.html", style="dim"))


def next_list(page: Page, record: Record) -> None:
    """What to do now."""
    steps = next_steps(record)
    if not steps:
        return
    page.heading("next")
    for i, step in enumerate(steps, 1):
        page.note(step, indent=5, first=f"  {i}.")


def closing(page: Page, record: Record, folder: str | None) -> None:
    """Where the report is, how long it took, and the exit code."""
    page.line()
    digest = short_digest(visible(record.contract.digest))
    page.line(Text(f"contract {digest}, {when(record)}", style="dim"))
    verdict = Text.assemble("exit code ", (str(record.exit_code), f"bold {_colour(record)}"))
    if folder is not None:
        base = visible(folder.rstrip("/"))
        verdict = Text(f"{base}/{REPORT_NAME}, {base}/report.html   ").append_text(verdict)
    page.whole(verdict)


def _colour(record: Record) -> str:
    return STYLES[record.verdict].removeprefix("bold ")
