"""``audit weights sync``, and comparisons with a live engine: parse, call one function, render."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_contracts.errors import InputError

if TYPE_CHECKING:
    from mismatch_audit.weights.findings import WeightReport
    from mismatch_audit.weights.live.base import LiveEngine
    from mismatch_audit.weights.live.faults import LiveFault
    from mismatch_audit.weights.live.report import SyncReport

EngineDtype = Annotated[
    str, typer.Option("--engine-dtype", help="dtype of an engine that is started here.")
]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="KEY=VALUE",
        help="Argument for an engine that is started here, for example max_model_len=512.",
    ),
]
Scratch = Annotated[
    Path | None,
    typer.Option(help="Folder for tensors in transit; a server must see it at the same path."),
]


def is_engine_spec(text: str) -> bool:
    """Whether an argument names a live engine rather than a file."""
    return text.startswith(("vllm:", "http://", "https://"))


@dataclass(frozen=True)
class EngineChoice:
    """How an engine is started and reached."""

    dtype: str = "auto"
    args: list[str] | None = None
    scratch: Path | None = None

    def open(self, spec: str) -> LiveEngine:
        from mismatch_audit.weights.live.base import open_engine

        if self.scratch is not None and not self.scratch.is_dir():
            raise InputError("no such folder", where=str(self.scratch), fix="create it")
        if spec.startswith(("http://", "https://")):
            if self.args or self.dtype != "auto":
                raise InputError(
                    "a running server keeps the dtype and arguments that it was started with",
                    where=spec,
                    fix="drop --engine-dtype and --engine-arg",
                )
            return open_engine(spec, scratch=self.scratch)
        return open_engine(spec, dtype=self.dtype, args=_parsed(self.args), scratch=self.scratch)


def _parsed(pairs: list[str] | None) -> dict[str, Any]:
    import yaml

    out: dict[str, Any] = {}
    for pair in pairs or []:
        key, mark, value = pair.partition("=")
        if not mark or not key.isidentifier():
            raise InputError("--engine-arg takes KEY=VALUE", where=pair)
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError("the value does not parse as YAML", where=pair) from error
    return out


def compared_with_engine(
    trainer: Path,
    served: str,
    previous: Path | None,
    adapter: Path | None,
    cast: str,
    quantiser: str | None,
    threads: int | None,
    choice: EngineChoice,
) -> WeightReport:
    """``audit weights TRAINER SERVED`` for a SERVED that is running."""
    import tempfile

    from mismatch_audit.weights.compare import CompareOptions
    from mismatch_audit.weights.live.base import local_checkpoint
    from mismatch_audit.weights.live.compare import compare_live
    from mismatch_audit.weights.schemes import scheme_by_name
    from mismatch_audit.weights.sides import open_side
    from mismatch_audit.weights.workers import default_threads

    master = open_side(local_checkpoint(str(trainer)), adapter)
    before = open_side(previous, peer=master.checkpoint) if previous else None
    options = CompareOptions(
        cast, scheme_by_name(quantiser) if quantiser else None, threads or default_threads()
    )
    with (
        tempfile.TemporaryDirectory(prefix="mismatch-audit-", dir=choice.scratch) as folder,
        choice.open(served) as engine,
    ):
        return compare_live(master, engine, Path(folder) / "served", before, options)


def sync(
    checkpoint: Annotated[
        Path, typer.Argument(help="Master checkpoint that is pushed (or sample).")
    ],
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="vllm:CHECKPOINT_DIR (the weights before the push, loaded into a vLLM of our own) "
            "or http://host:port (a running vLLM with the audit's extension).",
        ),
    ],
    export: Annotated[
        Path | None,
        typer.Option(help="The trainer's own export, sent as it is instead of our cast."),
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="Version to set (default: the engine's, plus one).")
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(help="Break the push on purpose (docs/weights.md lists how)."),
    ] = None,
    engine_dtype: EngineDtype = "auto",
    engine_arg: EngineArgs = None,
    scratch: Scratch = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Worker threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Report, but exit 0 whatever was found.")
    ] = False,
) -> None:
    """Push a checkpoint to a running engine with every check around it, and name the cause.

    The engine serves the pushed weights afterwards; while the audit runs it must serve nobody else.
    Exit codes: 0 every check passed, 1 a fault, 2 bad input, 3 something could not be observed,
    4 the engine serves another model.
    """
    from mismatch_audit.weights.live.audit import SyncOptions, audit_sync
    from mismatch_audit.weights.live.base import local_checkpoint

    checkpoint = local_checkpoint(str(checkpoint))
    if not checkpoint.is_dir():
        raise InputError("no such checkpoint folder", where=str(checkpoint))
    fault = _fault(inject)
    options = SyncOptions(export=export, version=version, scratch=scratch, threads=threads)
    say = (lambda _: None) if as_json else (lambda text: typer.echo(f"... {text}", err=True))
    with EngineChoice(engine_dtype, engine_arg, scratch).open(engine) as live:
        if fault is None:
            report = audit_sync(live, checkpoint, options, say)
        else:
            from mismatch_audit.weights.live.faults import audit_faulty

            report = audit_faulty(live, fault, checkpoint, options, say)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        _show(report)
    raise typer.Exit(0 if exit_zero else report.exit_code)


def _fault(flag: str | None) -> LiveFault | None:
    if flag is None:
        return None
    from mismatch_audit.weights.live.faults import fault_by_flag

    return fault_by_flag(flag)


def _show(report: SyncReport) -> None:
    from mismatch_audit.weights.render import show_sync

    show_sync(report)
