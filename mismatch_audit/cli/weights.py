"""``audit weights``, ``audit visibility``, ``audit export``: parse, call one function, render."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kernel_contracts.errors import InputError
from mismatch_audit.cli.weights_live import (
    EngineArgs,
    EngineChoice,
    EngineDtype,
    Scratch,
    compared_with_engine,
    is_engine_spec,
    sync,
)

if TYPE_CHECKING:
    from mismatch_audit.weights.findings import WeightReport
    from mismatch_audit.weights.manifest import Manifest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
ExitZero = Annotated[
    bool, typer.Option("--exit-zero", help="Report, but exit 0 whatever was found.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Worker threads (default: the cores of this process).")
]


class _CompareByDefault(TyperGroup):
    """``audit weights A B`` means ``audit weights compare A B``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["compare", *args]
        return super().parse_args(ctx, args)


weights_app = typer.Typer(
    name="weights",
    cls=_CompareByDefault,
    no_args_is_help=True,
    help="Does the engine serve the weights that the trainer trained? "
    "`audit weights TRAINER SERVED` compares; `audit weights sync CKPT --engine ENGINE` pushes "
    "under audit; `audit weights manifest PATH` writes digests. Exit codes: 0 equal, 1 a fault, "
    "2 bad input, 3 nothing to compare, 4 another model.",
)


@weights_app.command()
def compare(
    trainer: Annotated[Path, typer.Argument(help="Master: checkpoint or manifest.json.")],
    served: Annotated[
        str,
        typer.Argument(
            help="Served: checkpoint, manifest.json, vllm:CHECKPOINT_DIR (started here) "
            "or http://host:port (a running vLLM)."
        ),
    ],
    previous: Annotated[
        Path | None,
        typer.Option(help="The master before the push: proves that a weight is stale."),
    ] = None,
    trainer_adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter to merge into the trainer's weights.")
    ] = None,
    cast: Annotated[
        str, typer.Option(help="Demanded served dtype: auto, fp32, bf16 or fp16.")
    ] = "auto",
    quantiser: Annotated[
        str | None,
        typer.Option(help="How weights should be quantised, for example mxfp8:ceil."),
    ] = None,
    threads: Threads = None,
    engine_dtype: EngineDtype = "auto",
    engine_arg: EngineArgs = None,
    scratch: Scratch = None,
    every: Annotated[bool, typer.Option("--all", help="List equal tensors too.")] = False,
    as_json: AsJson = False,
    exit_zero: ExitZero = False,
) -> None:
    """Compare every served tensor with the cast of its master, bit by bit, and name the fault."""
    if is_engine_spec(served):
        if _is_manifest(trainer):
            raise InputError(
                "a live engine is compared with weights, not with a manifest", where=str(trainer)
            )
        report = compared_with_engine(
            trainer, served, previous, trainer_adapter, cast, quantiser, threads,
            EngineChoice(engine_dtype, engine_arg, scratch),
        )  # fmt: skip
    else:
        report = _compared(
            trainer, Path(served), previous, trainer_adapter, cast, quantiser, threads
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        from mismatch_audit.weights.render import show_report

        show_report(report, every)
    raise typer.Exit(0 if exit_zero else report.exit_code)


def _is_manifest(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def _compared(
    trainer: Path,
    served: Path,
    previous: Path | None,
    adapter: Path | None,
    cast: str,
    quantiser: str | None,
    threads: int | None,
) -> WeightReport:
    from mismatch_audit.weights.manifest import compare_manifests, read_manifest

    if _is_manifest(trainer) or _is_manifest(served):
        ours = read_manifest(trainer) if _is_manifest(trainer) else None
        theirs = read_manifest(served) if _is_manifest(served) else None
        target = ours.cast if ours else (theirs.cast if theirs else "none")
        ours = ours or _hashed(trainer, target, adapter, threads)
        theirs = theirs or _hashed(served, "none", None, threads)
        before = None
        if previous is not None:
            before = (
                read_manifest(previous)
                if _is_manifest(previous)
                else _hashed(previous, target, None, threads)
            )
        return compare_manifests(ours, theirs, before)
    from mismatch_audit.weights.compare import CompareOptions, compare_sides
    from mismatch_audit.weights.schemes import scheme_by_name
    from mismatch_audit.weights.sides import open_side
    from mismatch_audit.weights.workers import default_threads

    left = open_side(trainer, adapter)
    options = CompareOptions(
        cast, scheme_by_name(quantiser) if quantiser else None, threads or default_threads()
    )
    return compare_sides(
        left,
        open_side(served, peer=left.checkpoint),
        open_side(previous, peer=left.checkpoint) if previous else None,
        options,
    )


def _hashed(path: Path, cast: str, adapter: Path | None, threads: int | None) -> Manifest:
    from mismatch_audit.weights.digest import build_manifest
    from mismatch_audit.weights.sides import open_side

    return build_manifest(open_side(path, adapter), cast, threads=threads)


@weights_app.command()
def manifest(
    path: Annotated[Path, typer.Argument(help="Checkpoint directory or weight file.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write.")] = None,
    cast: Annotated[
        str,
        typer.Option(help="Cast before hashing: none, fp32, bf16, fp16, mxfp8, block_fp8, ..."),
    ] = "none",
    adapter: Annotated[Path | None, typer.Option(help="LoRA adapter to merge first.")] = None,
    step: Annotated[int | None, typer.Option(help="Training step of these weights.")] = None,
    data_cut: Annotated[
        str | None, typer.Option(help="Up to where the training data was seen.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Write the digests of a checkpoint, to compare without its weights."""
    from mismatch_audit.weights.digest import build_manifest
    from mismatch_audit.weights.sides import open_side

    built = build_manifest(open_side(path, adapter), cast, step, data_cut, threads)
    target = out or Path("manifest.json")
    try:
        built.write(target)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror}", where=str(target)) from error
    typer.echo(f"{built.digest}  {target}  ({len(built.tensors)} tensors, cast {cast})")


def visibility(
    before: Annotated[Path, typer.Option(help="Master before the step.")],
    after: Annotated[Path, typer.Option(help="Master after the step.")],
    origin: Annotated[
        Path | None, typer.Option(help="First master of the run, for the gain so far.")
    ] = None,
    cast: Annotated[
        str, typer.Option(help="Served format: bf16, fp16, fp8, mxfp8 or binary.")
    ] = "bf16",
    pushes: Annotated[
        int, typer.Option(min=1, help="Pushes of the same step to follow each export over.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the stochastic exports.")] = 0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file, one prompt a line: also measure the served-loss gap."),
    ] = None,
    threads: Threads = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """How much of a training step the served weights show, and what each export would change."""
    from mismatch_audit.weights.findings import plain_json
    from mismatch_audit.weights.grids import grid_by_name
    from mismatch_audit.weights.sides import open_side
    from mismatch_audit.weights.visibility import measure_visibility

    grid = grid_by_name(cast)
    old = open_side(before)
    report = measure_visibility(
        old,
        open_side(after, peer=old.checkpoint),
        grid,
        open_side(origin, peer=old.checkpoint) if origin else None,
        pushes,
        seed,
        threads,
    )
    document = report.to_dict()
    if prompts is not None:
        document["served_loss_gap"] = _loss_gap(after, prompts, cast, seed)
    if as_json:
        typer.echo(json.dumps(plain_json(document), indent=1))
        return
    from mismatch_audit.weights.render import show_visibility

    show_visibility(document, tensors)


def _loss_gap(path: Path, prompts: Path, cast: str, seed: int) -> dict[str, float]:
    from mismatch_audit.weights.grids import grid_by_name
    from mismatch_audit.weights.served_loss import served_loss_gap

    try:
        lines = [line for line in prompts.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", where=str(prompts)) from error
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return served_loss_gap(path, [tokenizer.encode(x) for x in lines], grid_by_name(cast), seed)


def export(
    master: Annotated[Path, typer.Argument(help="fp32 master checkpoint.")],
    out: Annotated[Path, typer.Argument(help="New folder for the served checkpoint.")],
    rounding: Annotated[
        str, typer.Option(help="nearest, stochastic, dither or feedback.")
    ] = "nearest",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Seed of stochastic and dither.")] = 0,
    push: Annotated[int, typer.Option(help="Number of this push: fresh noise for stochastic.")] = 0,
    state: Annotated[
        Path | None, typer.Option(help="Previous export, whose feedback goes on.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Training step, for the manifest.")] = None,
    data_cut: Annotated[str | None, typer.Option(help="Data cut, for the manifest.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write the served checkpoint of a master. Run again after an interruption, it goes on."""
    from mismatch_audit.weights.export import ExportOptions, export_checkpoint

    options = ExportOptions(rounding, dtype, seed, push, state, step, data_cut, threads)
    summary = export_checkpoint(master, out, options)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
        return
    typer.echo(
        f"{out}: {summary['cast']} of {summary['tensors']} tensors cast to {dtype} "
        f"({rounding}), {summary['bytes'] / 2**20:.1f} MiB, digest {summary['digest']}"
    )


def register(app: typer.Typer) -> None:
    """Adds the weight commands to the application."""
    weights_app.command()(sync)
    app.add_typer(weights_app, name="weights")
    app.command()(visibility)
    app.command()(export)
