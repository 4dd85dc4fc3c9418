"""``longdraft serve``: OpenAI's API with speculative decoding."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longdraft
from longdraft.cli import console, method_options, options
from longdraft.errors import CapabilityError, RequestError

if TYPE_CHECKING:
    from longdraft.model.checkpoints import Progress
    from longdraft.serve.service import Service
    from longdraft.serve.settings import Settings


@dataclass(frozen=True)
class ServiceOptions:
    """The command's options that make a service, in this process or in a replica.

    Attributes:
        first: options of the first method.
        sharing: how many services share the memory of this machine, or of the device.
    """

    hosting: method_options.Hosting
    first: dict[str, Any]
    sharing: int = 1

    def service(self, settings: Settings, progress: Progress) -> Service:
        from longdraft.serve.service import service_of

        loaded, arguments = self.hosting.loading.load(progress), self.hosting.arguments
        return service_of(loaded, settings, arguments, self.first, self.sharing, progress, console.note)

    def service_in_replica(self, settings: Settings) -> Service:
        options.load_file(self.hosting.composed)
        return self.service(settings, lambda _: None)


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
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; others get 429.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens of an answer at most.", show_default="what the context holds")
    ] = None,
    think: Annotated[
        bool, typer.Option("--think/--no-think", help="Let models think whose template knows how, unless asked not to.")
    ] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a request may take.")] = 600.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="API keys, one a line, with a name before it if you like.", show_default="none asked for"),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A further name that clients may call the server by, or * for all; repeatable.",
            show_default="localhost and --host",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Let pages of this origin ask, such as http://localhost:3000; repeatable.", show_default="none"
        ),
    ] = None,
    earlier: Annotated[
        int, typer.Option(min=0, help="Lookups also search this many tokens of the same key's earlier requests.")
    ] = 0,
    prefix_gib: Annotated[
        float, typer.Option(min=0, help="Memory for beginnings of texts that others have taken the slots of, in GiB.")
    ] = 2.0,
    snapshots: Annotated[
        Path | None, typer.Option(help="Keep prompts here, for the next start.", show_default="not kept")
    ] = None,
    snapshot_gib: Annotated[float, typer.Option(min=0.01, help="Limit of all prompts there, in GiB.")] = 4.0,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.", show_default="its own")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Serve with replicas on Ray, here or on a cluster.")] = False,
    replicas: Annotated[str, typer.Option(help="On Ray: how many.")] = "1",
    ray_config: Annotated[
        Path | None, typer.Option(help="On Ray: further options of the deployment, YAML.", show_default="none")
    ] = None,
    hosting: method_options.Hosting,
    debug: options.Debug = False,
) -> None:
    """Serve the model over HTTP: OpenAI's API (chat, completions, responses), Anthropic's, and a page to try it."""
    methods = tuple(word.strip() for word in method.split(",")) if method else ()
    first = hosting.own(methods[0] if methods else None, option)
    if not ray:  # replicas load it
        hosting.loading.begin()
    try:
        from longdraft.serve.run import Server
        from longdraft.serve.settings import LOCAL, Settings, checked_origins, read_keys
    except ImportError as error:
        raise CapabilityError(
            f'The server needs FastAPI, uvicorn and their like: pip install "longdraft[serve]" ({error}).'
        ) from error

    with options.settings_checked():
        keys = {} if api_key_file is None else read_keys(api_key_file)
        for i, each in enumerate(methods or (None,)):  # raises before a model is loaded
            longdraft.Speculator(each, **hosting.arguments, **({} if i else first))
        settings = Settings(
            name or hosting.name, methods, slots, context or 0, queue,
            max_tokens, timeout, keys=keys, think=think,
            hosts=(*LOCAL, "0.0.0.0" if host in ("", "::") else host, socket.gethostname(), *(allow_host or ())),
            origins=checked_origins(allow_origin or ()), earlier=earlier, snapshots=snapshots,
            snapshot_bytes=int(snapshot_gib * 2**30), tree_bytes=int(prefix_gib * 2**30),
        )  # fmt: skip
    made = ServiceOptions(hosting, first)
    if ray:
        _on_ray(made, settings, replicas, ray_config, host, port)
        return
    if replicas != "1" or ray_config is not None:
        raise RequestError("--replicas and --ray-config are for --ray: give that too.")
    with console.status() as status:
        service = made.service(settings, status)
    server = Server(service, host, port, access_log=debug)
    server.serve_beside(lambda port: _note_address(f"{settings.name} with {service.settings.methods[0]}", host, port))
    console.note("All requests have ended.")


def _on_ray(made: ServiceOptions, settings: Settings, replicas: str, config: Path | None, host: str, port: int) -> None:
    from longdraft.serve import ray

    if not replicas.isdigit() or not (count := int(replicas)):
        raise RequestError("--replicas takes a number; autoscaling_config in --ray-config scales them by the load.")
    loading = made.hosting.loading
    cores = 1 if loading.on_gpu else max(1, (os.cpu_count() or 1) // count)  # of each replica
    # Replicas share this machine, unless Ray runs on a cluster.
    sharing = 1 if os.environ.get("RAY_ADDRESS") else count
    made = replace(made, sharing=sharing, hosting=made.hosting.with_threads(cores))
    threads, gpus = made.hosting.loading.threads or 1, int(loading.on_gpu)
    deployment = ray.deployment(settings, count, threads, gpus, config, drain=300.0)
    with console.status() as status:
        status("Starting Ray and the replicas")
        if config is None:
            ray.require(ray.connected(), count, threads, gpus)

        def listens(port: int) -> None:
            status.close()
            _note_address(f"{settings.name}, on Ray", host, port)

        ray.serve(made.service_in_replica, settings, deployment, host, port, listens)
    console.note("All requests have ended.")


def _note_address(what: str, host: str, port: int) -> None:
    where = f"http://{host}:{port}"
    console.note(f"{what}: {where} (a page), {where}/v1 (the API). Ctrl-C ends it.")
