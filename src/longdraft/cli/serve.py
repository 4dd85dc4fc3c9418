"""``longdraft serve``: the OpenAI API with speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.cli import console, method_options, options
from longdraft.cli.serve_service import Serving
from longdraft.errors import CapabilityError, RequestError


def serve(
    *,
    method: Annotated[
        str | None,
        typer.Option(
            help="How to decode; several with commas between: a request may name one of them.",
            show_default="the first of self, longspec and prompt-lookup that suits the model, and ar",
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the first method, name=value; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    slots: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 4,
    context: Annotated[
        int | None,
        typer.Option(
            min=16, help="Tokens of the longest text.", show_default="the model's context, or what the memory holds"
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Requests that wait at most; others get 429.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a request at most.")] = 4096,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a request may take.")] = 600.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="API keys, one a line, with a name before it if you like.", show_default="none asked for"),
    ] = None,
    earlier: Annotated[
        int, typer.Option(min=0, help="Look up so many tokens of a key's earlier requests too; nobody else's.")
    ] = 0,
    snapshots: Annotated[
        Path | None, typer.Option(help="Keep prompts here, for the next start.", show_default="not kept")
    ] = None,
    snapshot_gib: Annotated[float, typer.Option(min=0.01, help="GiB of all of them.")] = 4.0,
    name: Annotated[str | None, typer.Option(help="The model's, to clients.", show_default="its own")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Serve with replicas on Ray, here or on a cluster.")] = False,
    replicas: Annotated[
        str, typer.Option(help="On Ray: how many, or as 1-4: at least and at most, by what there is to do.")
    ] = "1",
    ray_config: Annotated[
        Path | None, typer.Option(help="On Ray: further options of the deployment, YAML.", show_default="none")
    ] = None,
    drafting: method_options.DraftOptions,
    plan: options.Plan = None,
    loading: options.ModelOptions,
    offload: options.Offload = None,
    kv_dtype: options.KVDtype = None,
    composed: options.Load = None,
    debug: options.Debug = False,
) -> None:
    """Serve the model over HTTP, as OpenAI's API: chat, completions, responses, and a page to try it."""
    try:
        from longdraft.serve.run import Server
        from longdraft.serve.settings import Settings, read_keys
    except ImportError as error:
        raise CapabilityError(
            f'The server needs FastAPI, uvicorn and their like: pip install "longdraft[serve]" ({error}).'
        ) from error

    with options.settings_checked():
        keys = {} if api_key_file is None else read_keys(api_key_file)
        named = tuple(word.strip() for word in method.split(",")) if method else ()
        own = method_options.method_options(named[0] if named else None, option or []) | drafting.options()
        settings = Settings(
            name or "", named, slots, context or 0, queue, max_tokens, min(512, max_tokens), timeout, keys=keys,
            earlier=earlier, snapshots=snapshots, snapshot_bytes=int(snapshot_gib * 2**30),
        )  # fmt: skip
        shared: dict[str, Any] = {"offload": offload, "plan": plan, "kv_dtype": kv_dtype}
        serving = Serving(loading, named, own, shared, tuple(composed or ()), context, settings)
        serving.check()
    if ray:
        _on_ray(serving, replicas, ray_config, host, port)
        return
    if replicas != "1" or ray_config is not None:
        raise RequestError("--replicas and --ray-config are for --ray: give that too.")
    with console.status() as status:
        service = serving.service(status)
    server = Server(service, host, port, access_log=debug)
    settings = service.settings
    server.serve_beside(_listens(f"{settings.name} with {settings.methods[0]}", host))
    console.note("All requests have ended.")


def _on_ray(serving: Serving, replicas: str, config: Path | None, host: str, port: int) -> None:
    from longdraft.serve.cluster import connected
    from longdraft.serve.replicas import fleet, serve

    if serving.settings.snapshots is not None:
        raise RequestError("--snapshots: one process at a time keeps prompts in a folder, so not with --ray.")
    chosen = fleet(replicas, config, serving.loading.on_gpu, serving.loading.threads)
    serving = serving.among(chosen.most, chosen.cpus)
    with console.status() as status:
        status("Starting Ray and the replicas")
        connected()

        def listens(at: int) -> None:
            status.close()
            _listens(f"{serving.settings.name or 'The model'}, on Ray", host)(at)

        serve(serving.elsewhere, serving.settings, chosen, host, port, listens)
    console.note("All requests have ended.")


def _listens(what: str, host: str) -> Callable[[int], None]:
    def say(port: int) -> None:
        where = f"http://{host}:{port}"
        console.note(f"{what}: {where} (a page), {where}/v1 (the API). Ctrl-C ends it.")

    return say
