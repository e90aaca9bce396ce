"""The self-test as Markdown tables, written into a page between two markers."""

from __future__ import annotations

from pathlib import Path

from kernel_contracts.errors import InputError
from kernel_contracts.selftest import Trial, summary
from mismatch_audit.selftest.run import DetectableDrift, SelfTest

BEGIN, END = "<!-- selftest: begin -->", "<!-- selftest: end -->"


def write_tables(result: SelfTest, page: Path) -> None:
    """Replace what stands between the markers of a page. Raises InputError where there are none."""
    try:
        text = page.read_text(encoding="utf-8")
        before, mark, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not mark or not end:
            raise InputError(f"has no lines {BEGIN} and {END}", where=str(page))
        page.write_text(f"{before}{BEGIN}\n{markdown(result)}{END}{after}", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write it: {error.strerror or error}", where=str(page)) from error


def markdown(result: SelfTest) -> str:
    """What each fault does, which contract detects it by which clause, and the smallest drift."""
    measured = {m.name: m for m in result.measured}
    first = result.calibrations[0]
    names = [c.contract for c in result.calibrations]
    lines = [
        f"{first.n_prompts} prompts, {first.n_tokens} response tokens.",
        "",
        "| fault | what it is | KL(q, p) | mean abs dlp | flips | same greedy token |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for trial in (first.control, *first.faults):
        m = measured[trial.name]
        agree = next((c.value for c in trial.ordinary if c.name == "same greedy token"), None)
        share = "" if agree is None else f"{agree:.1%}"
        seen = "" if trial.ordinary_passed else " (ordinary checks see it)"
        lines.append(
            f"| `{trial.name}` | {trial.meaning}{seen} | {m.kl:.1e} | {m.abs_dlp:.1e} | "
            f"{m.flip_rate:.1%} | {share} |"
        )
    lines += ["", f"| fault | {' | '.join(names)} |", f"|{' --- |' * (len(names) + 1)}"]
    for row in zip(*((c.control, *c.faults) for c in result.calibrations), strict=True):
        cells = " | ".join(_cell(trial) for trial in row)
        lines.append(f"| `{row[0].name}` | {cells} |")
    states = " | ".join(f"**{c.state}**" for c in result.calibrations)
    lines.append(f"| verdict | {states} |")
    if all(d is not None for d in result.drifts):
        cells = " | ".join(_drift(d) for d in result.drifts if d is not None)
        lines.append(f"| smallest detected drift | {cells} |")
    lines.append("")
    for calibration in result.calibrations:
        lines.append(f"* {summary(calibration)}.")
        lines += [f"  * {t.name}: {t.reason}" for t in calibration.faults if t.reason]
        lines += [f"  * not tested: {text}" for text in calibration.left_out]
    return "\n".join(lines) + "\n"


def _cell(trial: Trial) -> str:
    if trial.name == "control":
        return trial.verdict
    if not trial.detected:
        return f"{trial.verdict}, {'borne' if trial.tolerated else '**missed**'}"
    return "FAIL: " + ", ".join(dict.fromkeys(clause for clause, _ in trial.caught_by))


def _drift(drift: DetectableDrift) -> str:
    if drift.caught is None:
        return f"none up to {drift.missed:g}"
    return f"{drift.caught:.1g} nats a logit, KL {drift.kl:.1e}"
