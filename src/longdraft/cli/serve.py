"""``longdraft serve``: serves OpenAI's and Anthropic's API with speculative decoding."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longdraft
from longdraft.cli import console, method_options, options
from longdraft.errors import RequestError, needs_extra

if TYPE_CHECKING:
    from longdraft.model.load.checkpoints import Progress
    from longdraft.serve.service import Service
    from longdraft.serve.settings import ServerSettings


def _make_service(
    decoding: method_options.DecodingOptions, first_method_options: dict[str, Any], num_services: int,
    settings: ServerSettings, progress: Progress = lambda message: None,
) -> Service:  # fmt: skip
    """Makes a service from options, in this process or in a replica.

    Args:
        first_method_options: options of the first method; further methods have none.
        num_services: number of services that share the memory of this machine, or of the device.
    """
    from longdraft.serve.service import make_service

    loaded, kwargs = decoding.model_options.load(progress), decoding.speculator_kwargs
    return make_service(loaded, settings, kwargs, first_method_options, num_services, progress, console.note)


def _make_replica(decoding: method_options.DecodingOptions, *args: Any) -> Service:
    options.run_user_files(decoding.user_files)  # a replica is a new process
    return _make_service(decoding, *args)


def serve(
    *,
    method: Annotated[
        str | None,
        typer.Option(
            help="Decoding method; requests may choose one of several, separated by commas.",
            show_default="the first of self, longspec and prompt-lookup that suits the model, and ar",
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the first method, name=value; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000,
    slots: Annotated[int, typer.Option(min=1, help="Number of requests decoded at a time.")] = 4,
    context: Annotated[
        int | None,
        typer.Option(
            min=16, help="Longest prompt with its answer, in tokens.", show_default="the model's context, or what fits"
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Number of requests that may wait; others get status 429.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of new tokens.", show_default="what the context allows")
    ] = None,
    think: Annotated[
        bool,
        typer.Option("--think/--no-think", help="Let models reason before they answer, unless a request turns it off."),
    ] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of a request, in seconds.")] = 600.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of API keys, one on each line; a name may precede a key.", show_default="no keys"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further host name by which clients may call the server; *: any; repeatable.",
            show_default="localhost and --host",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Allow pages of this origin (CORS), such as http://localhost:3000; repeatable.", show_default="none"
        ),
    ] = None,
    earlier: Annotated[
        int,
        typer.Option(min=0, help="Lookup also searches this many tokens of earlier requests with the same API key."),
    ] = 0,
    prefix_gib: Annotated[
        float, typer.Option(min=0, help="Memory of the prefix cache, for prompts that have left their slot, in GiB.")
    ] = 2.0,
    snapshots: Annotated[
        Path | None, typer.Option(help="Folder that keeps prompts' KV for the next start.", show_default="not kept")
    ] = None,
    snapshot_gib: Annotated[float, typer.Option(min=0.01, help="Size limit of --snapshots, in GiB.")] = 4.0,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients.", show_default="its own")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Serve with replicas on Ray, here or on a cluster.")] = False,
    replicas: Annotated[
        int, typer.Option(min=1, help="With --ray: number of replicas; --ray-config may scale them instead.")
    ] = 1,
    ray_config: Annotated[
        Path | None, typer.Option(help="With --ray: YAML file of further deployment options.", show_default="none")
    ] = None,
    decoding: method_options.DecodingOptions,
    debug: options.Debug = False,
) -> None:
    """Serve the model over HTTP: OpenAI's API (chat, completions, responses), Anthropic's API, and a chat page."""
    methods = tuple(method_options.split_commas(method or ""))
    first_method, first_method_options = decoding.resolve(methods[0] if methods else None, option)
    methods = methods or (() if first_method is None else (first_method,))
    if not ray:  # with Ray, the replicas load the model
        decoding.model_options.preload()
    with needs_extra("serve", "The server needs FastAPI, uvicorn and other packages"):
        from longdraft.serve.server import Server
        from longdraft.serve.settings import LOCAL_HOSTS, ServerSettings, normalize_origins, read_api_keys

    with options.settings_checked():
        keys = {} if api_key_file is None else read_api_keys(api_key_file)
        for i, method_name in enumerate(methods or (None,)):  # raises for bad options before the model is loaded
            longdraft.Speculator(method_name, **decoding.speculator_kwargs, **({} if i else first_method_options))
        settings = ServerSettings(
            name or decoding.model_name, methods, slots, context or 0, queue,
            max_tokens, timeout, keys=keys, think=think,
            hosts=(*LOCAL_HOSTS, "0.0.0.0" if host in ("", "::") else host, socket.gethostname(), *(allow_host or ())),
            origins=normalize_origins(allow_origin or ()), earlier=earlier, snapshots=snapshots,
            snapshot_bytes=int(snapshot_gib * 2**30), prefix_cache_bytes=int(prefix_gib * 2**30),
        )  # fmt: skip
    if ray:
        _on_ray(decoding, first_method_options, settings, replicas, ray_config, host, port)
        return
    if replicas != 1 or ray_config is not None:
        raise RequestError("--replicas and --ray-config need --ray: add it.")
    with console.status() as status:
        service = _make_service(decoding, first_method_options, 1, settings, status)
    server = Server(service, host, port, access_log=debug)
    label = f"{settings.name} with {service.settings.methods[0]}"
    server.run_with_engine(lambda port: _note_address(label, host, port))
    console.note("All requests have ended.")


def _on_ray(
    decoding: method_options.DecodingOptions, first_method_options: dict[str, Any], settings: ServerSettings,
    num_replicas: int, config_file: Path | None, host: str, port: int,
) -> None:  # fmt: skip
    """Serves with replicas on Ray until Ctrl-C."""
    from longdraft.serve import ray

    model_options = decoding.model_options
    cores = 1 if model_options.uses_gpu else max(1, (os.cpu_count() or 1) // num_replicas)  # CPU cores of a replica
    # Replicas share this machine's memory, unless Ray runs on a cluster.
    num_services = 1 if os.environ.get("RAY_ADDRESS") else num_replicas
    threads, gpus = model_options.threads or cores, int(model_options.uses_gpu)
    decoding = replace(decoding, model_options=replace(model_options, threads=threads))
    deployment = ray.deployment_options(settings, num_replicas, threads, gpus, config_file, drain_timeout=300.0)
    with console.status() as status:
        status("Starting Ray and the replicas")
        if config_file is None:
            ray.check_resources(ray.connect(), num_replicas, threads, gpus)

        make_replica = partial(_make_replica, decoding, first_method_options, num_services)

        def on_listening(port: int) -> None:
            status.close()
            _note_address(f"{settings.name}, on Ray", host, port)

        ray.serve(make_replica, settings, deployment, host, port, on_listening)
    console.note("All requests have ended.")


def _note_address(label: str, host: str, port: int) -> None:
    url = f"http://{host}:{port}"
    console.note(f"{label}: {url} (chat page), {url}/v1 (API). Ctrl-C ends the server.")
