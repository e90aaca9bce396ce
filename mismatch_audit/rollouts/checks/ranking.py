"""One root cause first: which findings follow from which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mismatch_audit.rollouts.checks.base import CheckResult

STANDALONE = {
    "TOKEN_OUTSIDE_VOCABULARY",
    "TOKENIZER_MISMATCH",
    "DOUBLE_BOS",
    "LOSS_ON_UNSAMPLED",
    "STOP_WITHOUT_EOS",
    "FORCED_EOS",
    "TURN_SEPARATOR_MISSING",
    "RETOKENISED_TURN",
    "HISTORY_EDITED",
    "PREFIX_NOT_EXTENDED",
    "COLUMNS_NOT_INDEPENDENT",
    "TRAINER_NOT_REPRODUCIBLE",
    "OLD_POLICY_NOT_BEHAVIOUR",
}
"""Faults of their own: they are in the tokens or the plumbing, and no mismatch explains them."""

FOLLOWS_ONLY = {"NONFINITE_LOGPROBS": {"RELOAD_CORRUPTS", "SHIFTED_LOGPROBS"}}
"""Findings that follow from these causes alone."""


def explain(results: Sequence[CheckResult]) -> list[CheckResult]:
    """The results, the named cause first, then what it explains, then what else was seen.

    All findings but ``STANDALONE`` ones are about the size of log p - log q. A log has one such
    size, so the one of highest priority leads and the others are marked ``consequence_of`` it:
    they may vanish with it, so look again once it is mended. Clean and unobserved checks follow.
    """
    found = sorted((r for r in results if r.status == "found"), key=lambda r: -r.priority)
    found.sort(key=lambda r: r.severity == "note")
    rest = sorted((r for r in results if r.status != "found"), key=lambda r: r.status == "clean")
    sized = [r for r in found if r.code not in STANDALONE and r.code not in FOLLOWS_ONLY]
    lead = sized[0].code if sized else ""
    causes, consequences = [], []
    for result in found:
        follows = result.code not in STANDALONE and result.code != lead
        if result.code in FOLLOWS_ONLY:
            follows = lead in FOLLOWS_ONLY[result.code]
        if follows:
            consequences.append(replace(result, consequence_of=lead))
        else:
            causes.append(result)
    return causes + consequences + rest
