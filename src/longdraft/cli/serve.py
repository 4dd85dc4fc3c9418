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
from longdraft.errors import CapabilityError, MemoryBudgetError, RequestError
from longdraft.memory import sizes

if TYPE_CHECKING:
    from longdraft.model.checkpoints import Progress
    from longdraft.model.runner import TargetRunner
    from longdraft.serve.service import Service
    from longdraft.serve.settings import Settings


@dataclass(frozen=True)
class ServiceOptions:
    """The command's options that make a service, in this process or in a replica.

    Attributes:
        methods: as the user named them; empty: the one that suits the model, and ar.
        first_arguments: of the first method's speculator. arguments: of all speculators.
        files: the user's own Python files, which a replica runs first.
        settings: the server's; their name, methods and context may be missing until the model is loaded.
        sharing: how many services share the memory of this machine, or of the device.
    """

    loading: options.ModelOptions
    methods: tuple[str, ...]
    first_arguments: dict[str, Any]
    arguments: dict[str, Any]
    files: tuple[Path, ...]
    context: int | None
    settings: Settings
    sharing: int = 1

    def check(self) -> None:
        """Raises Speculator's errors of wrong options, before a model is loaded."""
        for i, method in enumerate(self.methods or (None,)):
            longdraft.Speculator(method, **self.arguments, **({} if i else self.first_arguments))

    def as_replica(self, replicas: int, threads: int) -> ServiceOptions:
        """The options of each replica. They share this machine, unless Ray runs on a cluster."""
        sharing = 1 if os.environ.get("RAY_ADDRESS") else replicas
        return replace(self, sharing=sharing, loading=replace(self.loading, threads=self.loading.threads or threads))

    def service_in_replica(self) -> Service:
        from longdraft.serve.prefixes import own_folder

        options.load_file(list(self.files))
        kept = self.settings.snapshots
        settings = replace(self.settings, snapshots=None if kept is None else own_folder(kept))
        return replace(self, settings=settings).service(lambda _: None)

    def service(self, progress: Progress) -> Service:
        """Loads the model.

        Raises:
            RequestError, MemoryBudgetError: the context is longer than the model's, or than fits the memory.
        """
        from longdraft.methods import method_named
        from longdraft.serve.prefixes import DiskPrefixes
        from longdraft.serve.service import Service

        loaded, settings = self.loading.load(progress), self.settings

        def speculator(method: str | None) -> longdraft.Speculator:
            arguments = dict(self.arguments)
            if method is None or method in self.methods[:1]:
                arguments |= self.first_arguments
            if settings.earlier and (method is None or "earlier" in method_named(method).options):
                arguments |= {"earlier": settings.earlier}
                if method not in (None, "suffix", "prompt-lookup"):
                    arguments["lookup"] = True
            return longdraft.Speculator(method, loaded.model, loaded.tokenizer, **arguments)

        first = speculator(self.methods[0] if self.methods else None)
        first.planner(progress)
        methods = self.methods or tuple(dict.fromkeys((first.method.name, "ar")))
        settings = replace(
            settings,
            name=settings.name or Path(self.loading.model or "SmolLM2-135M-Instruct").name,
            methods=methods,
            context=self._context(first.runner(), len(methods)),
        )

        def cache(spec: longdraft.Speculator) -> longdraft.PromptCache:
            layers = spec.feature_layers()
            if spec is not first:
                return longdraft.PromptCache(layers)
            tree = self.settings.tree_bytes
            if settings.snapshots is None:
                return longdraft.PromptCache(layers, tree)
            return DiskPrefixes(
                settings.snapshots, spec.runner().fingerprint, settings.snapshot_bytes,
                feature_layers=layers, tree_bytes=tree,
            )  # fmt: skip

        service = Service(
            settings,
            lambda method: first if method == methods[0] else speculator(method),
            loaded.tokenizer,
            cache,
        )
        service.speculator(methods[0])
        first.record(settings.slots, settings.context, progress)
        return service

    def _context(self, runner: TargetRunner, methods: int) -> int:
        """Tokens of the longest text: as asked for, or as the model and the memory allow."""
        context, limit, slots = self.context, runner.context_length, self.settings.slots
        if context is not None and context > limit:
            raise RequestError(f"--context {context}: the model's context holds {limit} (--rope-factor stretches it).")
        room = _room(runner, slots * methods * self.sharing, self.settings.tree_bytes * self.sharing)
        if context is not None and context > room:
            raise MemoryBudgetError(
                f"--context {context}: the free memory holds {room} tokens for each of {slots} slots. Ask for "
                "less, for fewer --slots or, on a CPU, for a smaller --prefix-gib."
            )
        if context is None and limit > room:
            console.note(
                f"The memory that is free holds texts of {room:,} of the model's {limit:,} tokens in {slots} slots. "
                "Fewer --slots or, on a CPU, a smaller --prefix-gib leave room for longer ones."
            )
        context = context or min(limit, room)
        if runner.offload is None:
            most = _row_bytes(runner) * context * slots * methods
            console.note(
                f"{slots} slot{'s' * (slots > 1)} of {context:,} tokens: the KV takes {most / 2**30:.1f} GiB at most, "
                f"and the beginnings of other texts {self.settings.tree_bytes / 2**30:.1f}."
            )
        return context


def _row_bytes(runner: TargetRunner) -> int:
    """Bytes of KV of a token."""
    return runner.kv_shape.bytes_per_token * runner.kv_dtype.itemsize // runner.kv_shape.dtype.itemsize


def _room(runner: TargetRunner, slots: int, kept: int) -> int:
    """Tokens of context that fit the memory in each slot, beside ``kept`` bytes of the host's; a fifth of the memory
    stays free."""
    free = sizes.available_bytes(runner.device)
    if free is not None and runner.device.type == "cpu":
        free = max(0, free - kept)
    return 1 << 40 if free is None or runner.offload is not None else int(0.8 * free / (_row_bytes(runner) * slots))


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
    replicas: Annotated[
        str, typer.Option(help="On Ray: how many, or the fewest and the most, as 1-4, to scale by the load.")
    ] = "1",
    ray_config: Annotated[
        Path | None, typer.Option(help="On Ray: further options of the deployment, YAML.", show_default="none")
    ] = None,
    drafting: method_options.DraftOptions,
    plan: options.Plan = None,
    loading: options.ModelOptions,
    offload: options.Offload = None,
    kv_dtype: options.KVDtype = None,
    deterministic: options.Deterministic = False,
    composed: options.Load = None,
    debug: options.Debug = False,
) -> None:
    """Serve the model over HTTP, as OpenAI's API: chat, completions, responses, and a page to try it."""
    try:
        from longdraft.serve.run import Server
        from longdraft.serve.settings import LOCAL, Settings, checked_origins, read_keys
    except ImportError as error:
        raise CapabilityError(
            f'The server needs FastAPI, uvicorn and their like: pip install "longdraft[serve]" ({error}).'
        ) from error

    with options.settings_checked():
        keys = {} if api_key_file is None else read_keys(api_key_file)
        methods = tuple(word.strip() for word in method.split(",")) if method else ()
        first_arguments = method_options.method_options(methods[0] if methods else None, option or [])
        settings = Settings(
            name or "", methods, slots, context or 0, queue, max_tokens, timeout, keys=keys, think=think,
            hosts=(*LOCAL, "0.0.0.0" if host in ("", "::") else host, socket.gethostname(), *(allow_host or ())),
            origins=checked_origins(allow_origin or ()), earlier=earlier, snapshots=snapshots,
            snapshot_bytes=int(snapshot_gib * 2**30), tree_bytes=int(prefix_gib * 2**30),
        )  # fmt: skip
        service_options = ServiceOptions(
            loading,
            methods,
            first_arguments | drafting.options(),
            {"offload": offload, "plan": plan, "kv_dtype": kv_dtype, "deterministic": deterministic},
            tuple(composed or ()),
            context,
            settings,
        )
        service_options.check()
    if ray:
        _on_ray(service_options, replicas, ray_config, host, port)
        return
    if replicas != "1" or ray_config is not None:
        raise RequestError("--replicas and --ray-config are for --ray: give that too.")
    with console.status() as status:
        service = service_options.service(status)
    server = Server(service, host, port, access_log=debug)
    what = f"{service.settings.name} with {service.settings.methods[0]}"
    server.serve_beside(lambda port: _note_address(what, host, port))
    console.note("All requests have ended.")


def _on_ray(service_options: ServiceOptions, replicas: str, config: Path | None, host: str, port: int) -> None:
    from longdraft.serve.cluster import connected
    from longdraft.serve.replicas import fleet, serve

    settings, loading = service_options.settings, service_options.loading
    chosen = fleet(replicas, config, loading.on_gpu, loading.threads)
    service_options = service_options.as_replica(chosen.most, chosen.cpus)
    with console.status() as status:
        status("Starting Ray and the replicas")
        connected()

        def listens(port: int) -> None:
            status.close()
            _note_address(f"{settings.name or 'The model'}, on Ray", host, port)

        serve(service_options.service_in_replica, settings, chosen, host, port, listens)
    console.note("All requests have ended.")


def _note_address(what: str, host: str, port: int) -> None:
    where = f"http://{host}:{port}"
    console.note(f"{what}: {where} (a page), {where}/v1 (the API). Ctrl-C ends it.")
