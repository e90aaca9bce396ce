"""``audit``: parse, call one function, render, exit. Nothing heavy is imported before a command."""

from __future__ import annotations

import os
import sys

import typer

from mismatch_audit.cli import (
    bless,
    gate,
    ingest,
    key,
    promote,
    push,
    rollouts,
    routes,
    serve_router,
    watch,
    weights,
)
from mismatch_audit.cli.contract import contract_app
from mismatch_audit.cli.doctor import doctor
from mismatch_audit.cli.explain import explain
from mismatch_audit.cli.judge import judge
from mismatch_audit.cli.plan import plan
from mismatch_audit.cli.report import report
from mismatch_audit.cli.run import run
from mismatch_audit.cli.show import show

app = typer.Typer(
    name="audit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help costs 0.4 s of imports
    help="Does the serving engine evaluate the policy that the trainer trains? "
    "Exit codes: 0 pass, 1 contract violated, 2 bad input, 3 inconclusive or unobserved, "
    "4 not comparable or unsound.",
)
app.add_typer(contract_app, name="contract")
app.command()(run)
app.command()(judge)
app.command()(show)
app.command()(plan)
app.command()(report)
app.command()(doctor)
app.command()(explain)
weights.register(app)
key.register(app)
bless.register(app)
gate.register(app)
push.register(app)
routes.register(app)
serve_router.register(app)
ingest.register(app)
promote.register(app)
watch.register(app)
rollouts.register(app)


def main() -> None:
    """Entry point: errors of ours become one message on stderr and their exit code."""
    from kernel_contracts.errors import AuditError

    # libgomp's threads spin while they wait; beside the engine's process on 2 cores a matmul then
    # takes 7 ms instead of 1 (measured on AVX2). Read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except AuditError as error:
        if os.environ.get("MISMATCH_AUDIT_DEBUG"):
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; finished chunks are kept: add --resume to go on\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
