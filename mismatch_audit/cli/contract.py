"""``audit contract``: lint, show, diff, schema, derive, infer and selftest of contract files.

Heavy imports are inside the commands, so that ``audit --help`` stays quick.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatch_audit.cli.contract_derive import derive, infer
from mismatch_audit.cli.contract_selftest import selftest

if TYPE_CHECKING:
    from kernel_contracts.contract import Contract
    from kernel_contracts.contract_diff import Change
    from kernel_contracts.loading import Problem

contract_app = typer.Typer(
    name="contract",
    help="Check, show, compare, derive and self-test contract files.",
    no_args_is_help=True,
)
contract_app.command()(derive)
contract_app.command()(infer)
contract_app.command()(selftest)

ContractFile = Annotated[Path, typer.Argument(help="Contract file (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@contract_app.command()
def lint(
    files: Annotated[list[Path], typer.Argument(help="Contract files (YAML).")],
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts of the audit: warn about limits that they cannot certify."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print every mistake with its file, line and field. Exit 2 if there is one."""
    from kernel_contracts.errors import InputError
    from kernel_contracts.loading import Problem, check_file

    found: list[Problem] = []
    for file in files:
        try:
            contract, problems = check_file(file, prompts)
        except InputError as error:
            contract, problems = None, [Problem(str(file), 1, "", error.what, error.fix or "")]
        found += problems
        if not as_json:
            for problem in problems:
                typer.echo(str(problem))
            if contract is not None:
                typer.echo(f"{file}: ok: {_summary(contract)}")
    errors = sum(p.severity == "error" for p in found)
    if as_json:
        typer.echo(json.dumps([p.__dict__ for p in found], indent=1, ensure_ascii=False))
    elif errors:
        typer.echo(f"{errors} mistake{'s' if errors > 1 else ''}", err=True)
    if errors:
        raise typer.Exit(2)


@contract_app.command()
def schema(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write it to a file, for an editor.")
    ] = None,
) -> None:
    """Print the JSON Schema of contract files (draft 2020-12)."""
    from kernel_contracts.errors import InputError
    from kernel_contracts.loading import contract_json_schema

    text = json.dumps(contract_json_schema(), indent=2, ensure_ascii=False)
    if out is None:
        typer.echo(text)
        return
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write it: {error.strerror or error}", where=str(out)) from error


@contract_app.command()
def show(
    file: ContractFile,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the document with every default filled in.")
    ] = False,
) -> None:
    """Show what a contract promises, and how many prompts each clause needs at least."""
    from kernel_contracts.loading import load_contract
    from kernel_contracts.yaml_source import write_yaml

    contract = load_contract(file)
    if resolved:
        typer.echo(write_yaml(contract.document()), nl=False)
    else:
        _show(contract)


@contract_app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="The earlier contract.")],
    after: Annotated[Path, typer.Argument(help="The later contract.")],
    as_json: AsJson = False,
) -> None:
    """Compare two contracts: which promises became tighter, looser, were added or removed."""
    from kernel_contracts.contract_diff import diff_contracts
    from kernel_contracts.loading import load_contract

    old, new = load_contract(before), load_contract(after)
    changes = diff_contracts(old, new)
    if as_json:
        typer.echo(json.dumps([c.__dict__ for c in changes], indent=1, ensure_ascii=False))
    elif not changes:
        typer.echo("no difference")
    else:
        _show_changes(changes, old, new)


def _summary(contract: Contract) -> str:
    from kernel_contracts.contract import SECTIONS
    from kernel_contracts.lint import fewest_prompts
    from kernel_contracts.loading import contract_digest

    counts = [f"{len(getattr(contract, s))} {s}" for s in SECTIONS if getattr(contract, s)]
    least = max(fewest_prompts(c, contract.alpha) for c in contract.clauses())
    return (
        f"{contract.name}: clauses: {', '.join(counts)}; slices: {', '.join(contract.slices)}; "
        f"at least {least} prompts a slice; digest {contract_digest(contract)[:12]}"
    )


def _show(contract: Contract) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kernel_contracts.contract import SECTIONS
    from kernel_contracts.lint import fewest_prompts
    from kernel_contracts.loading import contract_digest
    from kernel_contracts.promotion import LIVE_STAGES

    console = Console(highlight=False)
    console.print(f"[bold]{contract.name}[/]  sha256:{contract_digest(contract)}")
    if contract.description:
        console.print(escape(contract.description.strip()))
    for side in ("reference", "engine"):
        facts = getattr(contract.pair, side)
        text = ", ".join(f"{k}={v}" for k, v in facts.items()) or "any"
        console.print(f"{side}: {escape(text)}")
    console.print(f"equal on both sides: {', '.join(contract.pair.same) or 'nothing'}")

    slices = Table("slice", "rows", box=box.SIMPLE_HEAD)
    for name, definition in contract.slices.items():
        slices.add_row(name, escape(_rows_of(definition)))
    console.print(slices)
    clauses = Table("clause", "promise", "slices", "prompts", box=box.SIMPLE_HEAD)
    clauses.columns[3].justify = "right"
    for section in SECTIONS:
        for clause in getattr(contract, section):
            clauses.add_row(
                clause.id,
                escape(promise(clause)),
                ", ".join(getattr(clause, "slices", ())),
                f">= {fewest_prompts(clause, contract.alpha)}",
            )
    console.print(clauses)
    for rule in contract.escalation:
        console.print(escape(_rule(rule)))
    if contract.promotion is not None:
        for stage in LIVE_STAGES:
            console.print(escape(f"{stage}: {_stage(contract.promotion.rule(stage))}"))


def promise(clause: Any) -> str:
    """A clause in words, for people."""
    from kernel_contracts.clauses import NumericalClause, ObservabilityClause, RuntimeClause

    if isinstance(clause, ObservabilityClause):
        return f"{clause.min_prompts} prompts with {', '.join(clause.require)}; " + (
            f"at most {clause.max_missing:.2%} missing" if clause.max_missing else "none missing"
        )
    if isinstance(clause, NumericalClause):
        if clause.share is None:
            return f"at most {clause.limit} {clause.metric}"
        return f"{clause.metric} > {clause.exceeds:g} on at most {clause.share:.2%} of tokens"
    what = f"{clause.probe} {clause.metric}" if isinstance(clause, RuntimeClause) else clause.metric
    at_least = getattr(clause, "at_least", None)
    text = f"mean {what} " + (f">= {at_least:g}" if at_least else f"<= {clause.limit:g}")
    if clause.warn is not None:
        text += f" (warn {clause.warn:g})"
    if clause.needs_tail:
        text += f"; > {clause.upper_end:g} on at most {clause.tail:.0%} of prompts"
    return text


def _rows_of(definition: Any) -> str:
    parts = [definition.where] if definition.where else []
    parts += [f"each {', '.join(definition.by)}"] if definition.by else []
    parts += [f"{c} in {list(e)}" for c, e in (definition.bins or {}).items()]
    return "; ".join(parts) or "all rows"


def _rule(rule: Any) -> str:
    who = rule.when.clause or "any clause"
    where = f" on {rule.when.slice}" if rule.when.slice else ""
    what = rule.action + (f" {rule.slice}" if rule.slice else "")
    return f"{rule.when.verdict} of {who}{where} -> {what}" + (f" to {rule.to}" if rule.to else "")


def _stage(rule: Any) -> str:
    wanted = [f">= {rule.min_prompts} prompts"]
    wanted += [f"{rule.min_tokens} tokens"] if rule.min_tokens else []
    wanted += [f"{rule.min_hours:g} hours"] if rule.min_hours else []
    clauses = ", ".join(rule.clauses or ("every sampled clause",))
    return f"{', '.join(wanted)}; {clauses}; a broken promise leads to {rule.on_violation}"


def _show_changes(changes: list[Change], old: Contract, new: Contract) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("change", "field", "before", "after", box=box.SIMPLE_HEAD)
    for change in changes:
        note = f" ({change.note})" if change.note else ""
        table.add_row(
            change.direction + note,
            escape(change.field),
            escape(_short(change.field, change.before, old)),
            escape(_short(change.field, change.after, new)),
        )
    Console(highlight=False).print(table)


def _short(field: str, value: Any, contract: Contract) -> str:
    if value is None:
        return "-"
    if field in {c.id for c in contract.clauses()}:
        return promise(contract.clause(field))
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if v not in (None, "", [])}
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
