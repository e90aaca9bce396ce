"""``audit serve-router``: a proxy that sends each request to a program that may answer it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PACKAGES = ("starlette", "uvicorn", "aiohttp", "prometheus_client")


def serve_router(
    routes: Annotated[Path, typer.Option(help="Table written by `audit routes`.")],
    reference: Annotated[
        list[str], typer.Option(help="URL of the reference's server; again for a replica.")
    ],
    engine: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of an engine of the table; again for a replica."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback reach the network.")
    ] = "127.0.0.1",
    metadata: Annotated[
        str,
        typer.Option(help="Whose metadata count: header (x-audit-metadata), body, or both."),
    ] = "both",
    handover: Annotated[
        bool,
        typer.Option(
            "--handover",
            help="Rules known in decode: let the engine begin streamed "
            "completions, and the reference take over at the first token they name.",
        ),
    ] = False,
    mirror: Annotated[
        Path | None, typer.Option(help="Traffic log for a sample of the engines' answers.")
    ] = None,
    mirror_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share to log.")] = 0.01,
    shadow_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the requests kept from an engine that it is "
            "asked too, for the log alone.",
        ),
    ] = 0.0,
    stage: Annotated[str, typer.Option(help="shadow, canary or full: written to the log.")] = (
        "canary"
    ),
    weights_version: Annotated[str | None, typer.Option(help="Written to the log.")] = None,
    default_temperature: Annotated[
        float, typer.Option(min=0.0, help="The engine's, where a request says none.")
    ] = 1.0,
    default_top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="As above.")] = 1.0,
    default_top_k: Annotated[int, typer.Option(min=-1, help="As above; 0 is none.")] = 0,
    max_body: Annotated[int, typer.Option(min=1024, help="Largest request, bytes.")] = 4 << 20,
    max_concurrent: Annotated[int, typer.Option(min=1, help="Requests in work at once.")] = 256,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 256,
    queue_timeout: Annotated[float, typer.Option(min=0.0, help="Longest wait, seconds.")] = 30.0,
    first_token_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until a stream begins, then another is asked.")
    ] = 300.0,
    idle_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two pieces of a stream.")
    ] = 120.0,
    response_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until an answer that is not streamed.")
    ] = 600.0,
) -> None:
    """Serve an OpenAI-compatible API in front of engines and the reference, by a routing table.

    SIGHUP, or a change of the file, reads the table again; a bad one leaves the old in force.
    """
    from importlib.util import find_spec
    from typing import get_args

    from kernel_contracts.errors import InputError

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the router needs {', '.join(missing)}", fix=f"pip install {' '.join(PACKAGES)}"
        )
    from mismatch_audit.monitor.traffic import TrafficStage
    from mismatch_audit.routing.proxy.backends import checked_url
    from mismatch_audit.routing.proxy.facts import Source
    from mismatch_audit.routing.proxy.mirror import MirrorSettings
    from mismatch_audit.routing.proxy.serve import Options, read_engines, serve
    from mismatch_audit.routing.proxy.settings import Limits

    for option, value, words in (
        ("--metadata", metadata, get_args(Source)),
        ("--stage", stage, get_args(TrafficStage)),
    ):
        if value not in words:
            raise InputError(f"not one of {', '.join(words)}: {value!r}", where=option)
    limits = Limits(
        body=max_body, concurrent=max_concurrent, queue=max_queue, queue_wait=queue_timeout,
        first_token=first_token_timeout, idle=idle_timeout, response=response_timeout,
    )  # fmt: skip
    options = Options(
        routes=routes,
        engines=read_engines(engine or []),
        references=[checked_url(url, "--reference") for url in reference],
        limits=limits,
        source=metadata,  # type: ignore[arg-type]
        mirror=mirror,
        mirror_settings=MirrorSettings(
            share=mirror_share, stage=stage, temperature=default_temperature,  # type: ignore[arg-type]
            top_p=default_top_p, top_k=default_top_k, weights_version=weights_version,
        ),
        shadow_share=shadow_share,
        handover=handover,
    )  # fmt: skip
    serve(options, host, port)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve-router")(serve_router)
