"""The record as one self-contained HTML page: no network, no scripts, light and dark."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from mismatch_audit.reports import charts, notation
from mismatch_audit.reports.advice import SYMBOLS, WORDS, horizon_note, next_steps, summary
from mismatch_audit.reports.escape import quoted, visible
from mismatch_audit.reports.grouping import clause_groups
from mismatch_audit.reports.identity_table import all_rows, identity_rows
from mismatch_audit.reports.record import Record
from mismatch_audit.reports.rollout_rows import SliceRow
from mismatch_audit.reports.rows import Chain, Facts, ProbeRow
from mismatch_audit.reports.staleness_table import (
    LAG_HEAD,
    PART_HEAD,
    lag_rows,
    part_rows,
    staleness_notes,
)

_FOLDER = Path(__file__).parent
_MANY_SLICES, _WORST_SLICES = 12, 4
_ROUTES = {"rms": "by the mean KL", "sup": "by the largest drift seen"}


def render_html(record: Record) -> str:
    """The page, as UTF-8 text. Same record, same bytes."""
    groups = clause_groups(record)
    scale = charts.limit_scale(record.measurements)
    views = record.views
    # Recorded rollouts are binned by what drew the token.
    whose = "reference" if record.rollouts is None else "sampler"
    drawn = {
        "flips": charts.flip_rate(views.flip_by_margin),
        "position": charts.kl_by_position(views.kl_by_position),
        "probability": charts.kl_by_probability(views.kl_by_reference_prob, whose),
        "gap": charts.gap_by_probability(views.kl_by_reference_prob, whose),
        "scatter": charts.logprob_scatter(views.logprob_scatter),
    }
    programs = identity_rows(record.identities)
    folded = any(group.folded for group in groups)
    return _template().render(
        r=record,
        css=Markup(_stylesheet()),
        symbols=SYMBOLS,
        words=WORDS,
        model=next((row.engine for row in programs if row.name == "model"), ""),
        summary=summary(record),
        steps=next_steps(record),
        when=notation.when(record),
        programs=programs,
        all_programs=all_rows(record.identities),
        groups=groups,
        all_groups=clause_groups(record, fold_above=len(record.measurements)) if folded else [],
        axis=charts.limit_axis(scale),
        strip=lambda row: charts.strip(row, scale),
        level=_level(record),
        charts=drawn,
        whose=whose,
        slices=_slices(record),
        any_chart=any(drawn.values()),
        chains=_chains(record.chain),
        titles=_ROUTES,
        gradient=_gradient(record.gradient),
        staleness=_staleness(record),
        probes=_probes(views.probes),
        digests={name: _whole(value) for name, value in record.digests.items()},
        timings={name: notation.duration(took) for name, took in record.timings.items()},
        contract_lines=json.dumps(
            record.contract.document, indent=2, ensure_ascii=False
        ).splitlines(),
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "clause_title": notation.clause_title,
        "count": notation.count,
        "digest": notation.short_digest,
        "fact": notation.fact,
        "horizon": _horizon,
        "interval": notation.interval,
        "limit": notation.limit,
        "metric_title": notation.metric_title,
        "number": notation.number,
        "probability": notation.probability,
        "quantity": lambda row: notation.quantity(row, row.value),
        "quoted": quoted,
    }
    return environment.get_template("report.html.j2")


def _shown(value: Any) -> Any:
    """Runs on every value that the template prints, before escaping: control characters and
    bidirectional overrides never reach the page."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@lru_cache(maxsize=1)
def _stylesheet() -> str:
    return (_FOLDER / "report.css").read_text(encoding="utf-8")


def _level(record: Record) -> str:
    alpha = record.contract.document.get("alpha", 0.05)
    return f"{100 * (1 - alpha):g} % bounds" if isinstance(alpha, float) else "bounds"


def _horizon(tokens: float | None) -> str:
    return "not one token" if tokens is not None and tokens < 1 else horizon_note(tokens)


def _whole(value: Any) -> Any:
    """A digest in groups of sixteen: whole, to compare, and it wraps."""
    if not isinstance(value, str) or len(value) < 32:
        return value
    return " ".join(value[i : i + 16] for i in range(0, len(value), 16))


def _chains(chains: list[Chain]) -> dict[str, list[Chain]]:
    by_slice: dict[str, list[Chain]] = {}
    for chain in chains:
        by_slice.setdefault(chain.slice, []).append(chain)
    return by_slice


def _slices(record: Record) -> list[tuple[list[SliceRow], int]]:
    """Of each definition the slices to show, and how many are left to the whole table: of many the
    ones with the largest mismatch."""
    by_definition: dict[str, list[SliceRow]] = {}
    for row in record.rollouts.slices if record.rollouts else []:
        by_definition.setdefault(row.definition, []).append(row)
    shown = []
    for rows in by_definition.values():
        kept = rows
        if len(rows) > _MANY_SLICES:
            worst = sorted(rows, key=lambda row: -(row.abs_dlp or 0.0))[:_WORST_SLICES]
            kept = [row for row in rows if row in worst]
        shown.append((kept, len(rows) - len(kept)))
    return shown


def _gradient(rows: list[Facts]) -> dict[str, Any] | None:
    """A table of free facts: its columns are the union of their names, in order."""
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {
        "names": names,
        "rows": [[_cell(row.get(name)) for name in names] for row in rows],
    }


def _cell(value: Any) -> str:
    """Four digits where three would turn a cosine of 0.9996 into 1."""
    if isinstance(value, float) and 0.01 <= abs(value) < 1:
        return f"{value:.4g}"
    return notation.fact(value)


def _staleness(record: Record) -> dict[str, Any] | None:
    """Both tables of staleness and their notes."""
    if record.rollouts is None or not record.rollouts.staleness:
        return None
    facts = record.rollouts.staleness
    tables = [(LAG_HEAD, lag_rows(facts)), (PART_HEAD, part_rows(facts))]
    return {
        "tables": [{"names": head, "rows": rows} for head, rows in tables if rows],
        "notes": staleness_notes(facts),
    }


def _probes(rows: list[ProbeRow]) -> dict[str, Any] | None:
    """One row a probe, one column a metric."""
    if not rows:
        return None
    names = list(dict.fromkeys(row.metric for row in rows))
    table = []
    for probe in dict.fromkeys(row.probe for row in rows):
        mine = {row.metric: row for row in rows if row.probe == probe}
        cells = [
            notation.NOTHING if name not in mine
            else notation.percent(mine[name].value) if name == "flip_rate"
            else notation.number(mine[name].value)
            for name in names
        ]  # fmt: skip
        table.append(
            {
                "probe": probe,
                "cells": cells,
                "n_prompts": max(row.n_prompts for row in mine.values()),
                "detail": "; ".join(row.detail for row in mine.values() if row.detail),
            }
        )
    return {"names": names, "rows": table}
