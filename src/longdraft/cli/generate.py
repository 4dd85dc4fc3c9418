"""``longdraft generate``: read, answer, show."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import typer

import longdraft
from longdraft.cli import console, method_options, options, processes, prompt_input
from longdraft.cli.cancel import EXIT_CODE, Cancel
from longdraft.cli.display import TextOutput, display_run
from longdraft.cli.figures import comparison_json, comparison_view, footer, result_json
from longdraft.errors import CheckpointError
from longdraft.model.chat import chat_prompt, encode


def generate(
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The instruction; with a file, it follows the document.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", help="A document in UTF-8; repeat it for several. - is standard input."),
    ] = None,
    method: options.Method = None,
    option: options.MethodOptionPairs = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 256,
    choosing: options.SamplingOptions,
    seed: Annotated[int | None, typer.Option(help="The same seed samples the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    wording: options.TemplateOptions,
    kv_cache: Annotated[
        Path | None,
        typer.Option("--kv-cache", help="Keep the read prompt in this file; the next run starts from it."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too: how much faster, and the same?")
    ] = False,
    hosting: method_options.DecodingOptions,
    output: options.OutputOptions,
) -> None:
    """Answer a prompt, about documents if there are any. The text goes to stdout, all else to stderr."""
    own_options = hosting.resolve_options(method, option)

    hosting.model_options.preload()
    # Imports of seconds, which wrong options of methods do not wait for.
    from longdraft.engine.request import normalize_stop
    from longdraft.model.kernel_report import kernel_report

    with options.settings_checked():
        sampling = choosing.sampling()
        # A draft that cannot be read is refused before the model is loaded.
        spec = longdraft.Speculator(method, **hosting.speculator_kwargs, **own_options)
        if max_tokens < 1:
            raise ValueError(f"--max-tokens must be at least 1, got {max_tokens}")
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"--seed must be a number from 0 to 2^63 - 1, got {seed}")
        stops = normalize_stop(stop or ())
    processes.check_options({"--kv-cache": kv_cache, "standard input": prompt_input.STDIN in (file or [])})
    if kv_cache is not None and kv_cache.is_dir():
        raise CheckpointError(f"{kv_cache} is a folder: --kv-cache takes the name of a file.")
    request = prompt_input.read_prompt(prompt, file or [])
    with console.status() as status:
        loaded = hosting.model_options.load(status)
        status("Preparing the prompt")
        with options.settings_checked():
            spec.use(loaded.model, loaded.tokenizer)
            if method is None and own_options and own_options.get("draft") is None:
                asked = " and ".join(own_options)
                console.note(f"No --method: decoding with {spec.method.name}, which has the option {asked}.")
            spec.planner(status)
        if raw:
            tokens = encode(loaded.tokenizer, "\n\n".join(part for part in request if part))
        else:
            tokens = chat_prompt(loaded.tokenizer, request.instruction, document=request.document, **wording.asked)
    if not sampling.greedy and seed is None:
        share = spec.runner().tp_rank
        seed = random.randrange(2**32) if share is None else share.shared_seed()
        console.note(f"Sampling with --seed {seed}")
    cache, restored = longdraft.PromptCache(), False
    if kv_cache is not None and kv_cache.exists():
        cache, restored = longdraft.PromptCache.restored(kv_cache, spec.runner().fingerprint), True
    with Cancel() as cancel:
        arguments: dict[str, Any] = {
            "max_new_tokens": max_tokens, "sampling": sampling, "seed": seed, "stop": stops, "cache": cache,
            "cancelled": cancel,
        }  # fmt: skip
        text = TextOutput(silent=output.as_json)
        own = display_run(spec.stream(tokens, **arguments), len(tokens), text)
        restored = restored and not cache.snapshot_damaged
        if restored:
            console.note(f"{kv_cache}: {own.cached_tokens:,} of {len(tokens):,} prompt tokens were there")
        console.stderr().print()
        console.print_renderable(console.stderr(), footer(own, kernel_report(spec.runner()).line, text.colored))
        report: dict[str, Any] = result_json(own)
        if compare:
            report["compare"] = None if cancel() else _compared(spec, own, loaded, tokens, arguments)
    output.print_json(report)  # before the file: a full disk must not cost the answer
    if kv_cache is not None and not restored and own.token_ids:
        assert cache.store is not None
        cache.store.truncate(0, len(tokens))  # the answer's rows are cut off
        cache.record_tokens(0, tokens)
        cache.save(kv_cache, spec.runner().fingerprint)
        console.note(f"{kv_cache}: kept {len(tokens):,} prompt tokens for the next run")
    if cancel():
        console.note("Cancelled.")
        raise typer.Exit(EXIT_CODE)


def _compared(
    spec: longdraft.Speculator,
    own: longdraft.Result,
    loaded: longdraft.LoadedModel,
    tokens: list[int],
    arguments: dict[str, Any],
) -> dict[str, Any] | None:
    """Decodes with ``ar`` from the prompt's KV, says how the two compare, and returns it for the JSON object."""
    from longdraft.bench.ties import compare_outputs

    same: dict[str, Any] = {"offload": spec.offload, "deterministic": spec.deterministic}
    console.note("Decoding the same prompt plainly (ar) ...")
    ar = longdraft.Speculator("ar", loaded.model, loaded.tokenizer, **same).stream(tokens, **arguments).results()[0]
    if arguments["cancelled"]():
        return None
    tie = compare_outputs(spec.runner(), tokens, own.token_ids, ar.token_ids, arguments["sampling"], arguments["cache"])
    console.stderr().print()
    console.print_renderable(console.stderr(), comparison_view(own, ar, tie, spec.decode))
    return comparison_json(own, ar, tie)
