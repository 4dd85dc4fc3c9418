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
    from longdraft.serve.settings import ServerSettings


@dataclass(frozen=True)
class ServiceOptions:
    """The command's options that make a service, in this process or in a replica.

    Attributes:
        method_options: options of the first method.
        num_sharing: how many services share the memory of this machine, or of the device.
    """

    hosting: method_options.DecodingOptions
    method_options: dict[str, Any]
    num_sharing: int = 1

    def make_service(self, settings: ServerSettings, progress: Progress) -> Service:
        from longdraft.serve.service import make_service

        loaded, arguments = self.hosting.model_options.load(progress), self.hosting.speculator_kwargs
        return make_service(loaded, settings, arguments, self.method_options, self.num_sharing, progress, console.note)

    def make_replica_service(self, settings: ServerSettings) -> Service:
        options.run_user_files(self.hosting.user_files)
        return self.make_service(settings, lambda _: None)


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
    hosting: method_options.DecodingOptions,
    debug: options.Debug = False,
) -> None:
    """Serve the model over HTTP: OpenAI's API (chat, completions, responses), Anthropic's, and a page to try it."""
    methods = tuple(word.strip() for word in method.split(",")) if method else ()
    first = hosting.resolve_options(methods[0] if methods else None, option)
    if not ray:  # replicas load it
        hosting.model_options.preload()
    try:
        from longdraft.serve.server import Server
        from longdraft.serve.settings import LOCAL_HOSTS, ServerSettings, normalize_origins, read_api_keys
    except ImportError as error:
        raise CapabilityError(
            f'The server needs FastAPI, uvicorn and their like: pip install "longdraft[serve]" ({error}).'
        ) from error

    with options.settings_checked():
        keys = {} if api_key_file is None else read_api_keys(api_key_file)
        for i, each in enumerate(methods or (None,)):  # raises before a model is loaded
            longdraft.Speculator(each, **hosting.speculator_kwargs, **({} if i else first))
        settings = ServerSettings(
            name or hosting.model_name, methods, slots, context or 0, queue,
            max_tokens, timeout, keys=keys, think=think,
            hosts=(*LOCAL_HOSTS, "0.0.0.0" if host in ("", "::") else host, socket.gethostname(), *(allow_host or ())),
            origins=normalize_origins(allow_origin or ()), earlier=earlier, snapshots=snapshots,
            snapshot_bytes=int(snapshot_gib * 2**30), prefix_cache_bytes=int(prefix_gib * 2**30),
        )  # fmt: skip
    made = ServiceOptions(hosting, first)
    if ray:
        _on_ray(made, settings, replicas, ray_config, host, port)
        return
    if replicas != "1" or ray_config is not None:
        raise RequestError("--replicas and --ray-config are for --ray: give that too.")
    with console.status() as status:
        service = made.make_service(settings, status)
    server = Server(service, host, port, access_log=debug)
    server.run_with_engine(
        lambda port: _note_address(f"{settings.name} with {service.settings.methods[0]}", host, port)
    )
    console.note("All requests have ended.")


def _on_ray(
    made: ServiceOptions, settings: ServerSettings, replicas: str, config: Path | None, host: str, port: int
) -> None:
    from longdraft.serve import ray

    if not replicas.isdigit() or not (count := int(replicas)):
        raise RequestError("--replicas takes a number; autoscaling_config in --ray-config scales them by the load.")
    loading = made.hosting.model_options
    cores = 1 if loading.uses_gpu else max(1, (os.cpu_count() or 1) // count)  # of each replica
    # Replicas share this machine, unless Ray runs on a cluster.
    num_sharing = 1 if os.environ.get("RAY_ADDRESS") else count
    made = replace(made, num_sharing=num_sharing, hosting=made.hosting.with_threads(cores))
    threads, gpus = made.hosting.model_options.threads or 1, int(loading.uses_gpu)
    deployment = ray.deployment_options(settings, count, threads, gpus, config, drain_timeout=300.0)
    with console.status() as status:
        status("Starting Ray and the replicas")
        if config is None:
            ray.check_resources(ray.connect(), count, threads, gpus)

        def listens(port: int) -> None:
            status.close()
            _note_address(f"{settings.name}, on Ray", host, port)

        ray.serve(made.make_replica_service, settings, deployment, host, port, listens)
    console.note("All requests have ended.")


def _note_address(what: str, host: str, port: int) -> None:
    where = f"http://{host}:{port}"
    console.note(f"{what}: {where} (a page), {where}/v1 (the API). Ctrl-C ends it.")
