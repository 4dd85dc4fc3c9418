"""``longdraft serve``: the OpenAI API with speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.cli import console, options
from longdraft.errors import CapabilityError, MemoryBudgetError, RequestError
from longdraft.host.runner import TargetRunner
from longdraft.kv import memory
from longdraft.kv.prompt_cache import PromptCache
from longdraft.methods import method as method_named
from longdraft.speculator import Speculator

_NEEDS = 'The server needs FastAPI and uvicorn: pip install "longdraft[serve]".'


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
    drafting: options.DraftOptions,
    plan: options.Plan = None,
    loading: options.ModelOptions,
    offload: options.Offload = None,
    kv_dtype: options.KVDtype = None,
    composed: options.Load = None,
    debug: options.Debug = False,
) -> None:
    """Serve the model over HTTP, as OpenAI's API: chat, completions, responses, and a page to try it."""
    try:
        from longdraft.serve.prefixes import DiskPrefixes
        from longdraft.serve.run import Server
        from longdraft.serve.service import Service
        from longdraft.serve.settings import Settings, read_keys
    except ImportError as error:
        raise CapabilityError(
            f'The server needs FastAPI, uvicorn and their like: pip install "longdraft[serve]" ({error}).'
        ) from error

    with options.settings_checked():
        keys = {} if api_key_file is None else read_keys(api_key_file)
        named = tuple(word.strip() for word in method.split(",")) if method else ()
        own = options.method_options(named[0] if named else None, option or []) | drafting.options()
        shared: dict[str, Any] = {"offload": offload, "plan": plan, "kv_dtype": kv_dtype}
        for each in named or (None,):
            Speculator(each, **shared, **(own if each is None or each == named[0] else {}))
    with console.status() as status:
        loaded = loading.load(status)

        def speculator(chosen: str | None) -> Speculator:
            made = dict(own) if chosen is None or chosen in named[:1] else {}
            if earlier and (chosen is None or "earlier" in method_named(chosen).options):
                made |= {"earlier": earlier} | ({} if chosen in (None, "suffix", "prompt-lookup") else {"lookup": True})
            return Speculator(chosen, loaded.model, loaded.tokenizer, **shared, **made)

        first = speculator(named[0] if named else None)
        first.planner(status)
    methods = named or tuple(dict.fromkeys((first.method.name, "ar")))
    limit = first.runner().context_length
    if context is not None and context > limit:
        raise RequestError(f"--context {context}: the model's context holds {limit} (--rope-factor stretches it).")
    holds = _room(first.runner(), slots * len(methods))
    if context is not None and context > holds:
        raise MemoryBudgetError(f"--context {context}: the free memory holds {holds} tokens for each of {slots} slots.")
    if context is None and limit > holds:
        console.note(
            f"The memory that is free holds texts of {holds:,} of the model's {limit:,} tokens in {slots} slots."
        )
    limit = min(limit, holds)
    settings = Settings(
        name or Path(loading.model or "SmolLM2-135M-Instruct").name, methods, slots, context or limit, queue,
        max_tokens, min(512, max_tokens), timeout, keys=keys, earlier=earlier, snapshots=snapshots,
        snapshot_bytes=int(snapshot_gib * 2**30),
    )  # fmt: skip

    def cache(spec: Speculator) -> PromptCache:
        if snapshots is None or spec is not first:
            return PromptCache(spec.feature_layers())
        fingerprint = spec.runner().fingerprint
        return DiskPrefixes(snapshots, fingerprint, settings.snapshot_bytes, feature_layers=spec.feature_layers())

    service = Service(
        settings, lambda chosen: first if chosen == methods[0] else speculator(chosen), loaded.tokenizer, cache
    )
    service.speculator(methods[0])
    server = Server(service, host, port, access_log=debug)

    def listens(at: int) -> None:
        where = f"http://{host}:{at}"
        console.note(f"{settings.name} with {methods[0]}: {where} (a page), {where}/v1 (the API). Ctrl-C ends it.")

    server.serve_beside(listens)
    console.note("All requests have ended.")


def _room(runner: TargetRunner, slots: int) -> int:
    """Tokens of context for each of so many slots that the memory holds, with some of it left for all else."""
    free = memory.available_bytes(runner.device)
    each = runner.kv_shape.bytes_per_token * runner.kv_dtype.itemsize // runner.kv_shape.dtype.itemsize
    return 1 << 40 if free is None or runner.offload is not None else int(0.8 * free / (each * slots))
