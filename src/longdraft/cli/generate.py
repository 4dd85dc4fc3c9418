"""``longdraft generate``: answers a prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any

import typer

import longdraft
from longdraft.cli import console, method_options, options, processes, prompt_input
from longdraft.cli.cancel import CTRL_C_EXIT_CODE, Cancel
from longdraft.cli.display import TextOutput, display_run
from longdraft.cli.figures import comparison_json, comparison_view, footer, result_json
from longdraft.engine.chat import chat_prompt, encode
from longdraft.errors import CheckpointError
from longdraft.options import whole_number


def generate(
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; with --file, the question after the documents.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", help="Document to read, text in UTF-8 or PDF; repeatable. - is standard input."),
    ] = None,
    method: options.Method = None,
    option: options.MethodOptionPairs = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of new tokens.")] = 256,
    sampling_options: options.SamplingOptions,
    seed: Annotated[int | None, typer.Option(help="Random seed: the same seed samples the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this string; repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt, without a chat template.")] = False,
    template_options: options.TemplateOptions,
    kv_cache: Annotated[
        Path | None,
        typer.Option("--kv-cache", help="Save the prompt's KV cache to this file, and reuse it in the next run."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Decode with ar too; compare speed and tokens.")] = False,
    decoding: method_options.DecodingOptions,
    output: options.OutputOptions,
) -> None:
    """Answer a prompt, with or without documents. The text goes to stdout, all else to stderr."""
    method, method_args = decoding.resolve(method, option)
    decoding.model_options.preload()
    # Slow imports come after the check of options.
    from longdraft.cli.kernel_report import kernel_report
    from longdraft.engine.request import normalize_stop

    with options.settings_checked():
        sampling = sampling_options.sampling()
        # The draft is read before the model is loaded, to report a wrong one at once.
        spec = longdraft.Speculator(method, **decoding.speculator_kwargs, **method_args)
        whole_number("--max-tokens", max_tokens, 1)
        whole_number("--seed", seed or 0, 0, 2**63 - 1)
        stops = normalize_stop(stop or ())
    processes.check_options({"--kv-cache": kv_cache, "standard input": prompt_input.STDIN in (file or [])})
    if kv_cache is not None and kv_cache.is_dir():
        raise CheckpointError(f"{kv_cache} is a folder: --kv-cache takes the name of a file.")
    parts = prompt_input.read_prompt(prompt, file or [])
    with console.status() as status:
        loaded = decoding.model_options.load(status)
        status("Preparing the prompt")
        with options.settings_checked():
            spec.use(loaded.model, loaded.tokenizer)
            if method is None and method_args and method_args.get("draft") is None:
                names = " and ".join(method_args)
                console.note(f"No --method: decoding with {spec.method.name}, which has the option {names}.")
            spec.planner(status)
        if raw:
            token_ids = encode(loaded.tokenizer, "\n\n".join(part for part in parts if part))
        else:
            kwargs = {"document": parts.document, **template_options.chat_prompt_kwargs}
            token_ids = chat_prompt(loaded.tokenizer, parts.instruction, **kwargs)
    if not sampling.greedy and seed is None:
        tp_rank = spec.runner().tp_rank
        seed = random.randrange(2**32) if tp_rank is None else tp_rank.shared_seed()  # processes share the seed
        console.note(f"Sampling with --seed {seed}")
    cache, restored = longdraft.PromptCache(), False
    if kv_cache is not None and kv_cache.exists():
        cache, restored = longdraft.PromptCache.restored(kv_cache, spec.runner().fingerprint), True
    with Cancel() as cancel:
        stream_args: dict[str, Any] = {
            "max_new_tokens": max_tokens, "sampling": sampling, "seed": seed, "stop": stops, "cache": cache,
            "cancelled": cancel,
        }  # fmt: skip
        text_output = TextOutput(silent=output.as_json)
        result = display_run(spec.stream(token_ids, **stream_args), len(token_ids), text_output)
        restored = restored and not cache.snapshot_damaged  # a damaged file is replaced below
        if restored:
            console.note(f"{kv_cache}: {result.cached_tokens:,} of {len(token_ids):,} prompt tokens reused")
        console.stderr().print()
        kernels = kernel_report(spec.runner()).line
        console.print_renderable(console.stderr(), footer(result, kernels, text_output.colored))
        report: dict[str, Any] = result_json(result)
        if compare:
            report["compare"] = None if cancel() else _compare_with_ar(spec, result, loaded, token_ids, stream_args)
    output.print_json(report)  # printed before the KV cache is saved, which may fail
    if kv_cache is not None and not restored and result.token_ids:
        assert cache.store is not None
        cache.store.truncate(0, len(token_ids))  # only the prompt's KV is saved
        cache.record_tokens(0, token_ids)
        cache.save(kv_cache, spec.runner().fingerprint)
        console.note(f"{kv_cache}: saved {len(token_ids):,} prompt tokens for the next run")
    if cancel():
        console.note("Cancelled.")
        raise typer.Exit(CTRL_C_EXIT_CODE)


def _compare_with_ar(
    spec: longdraft.Speculator,
    result: longdraft.Result,
    loaded: longdraft.LoadedModel,
    token_ids: list[int],
    stream_args: dict[str, Any],
) -> dict[str, Any] | None:
    """Decodes the prompt again with ``ar``, prints the comparison, and returns it for the JSON object."""
    from longdraft.bench.ties import compare_outputs

    shared_kwargs: dict[str, Any] = {"offload": spec.offload, "deterministic": spec.deterministic}
    ar_spec = longdraft.Speculator("ar", loaded.model, loaded.tokenizer, **shared_kwargs)
    console.note(f"Decoding the same prompt plainly (ar){'' if spec.exact else ', without approximations'} ...")
    ar = ar_spec.stream(token_ids, **stream_args).results()[0]
    if stream_args["cancelled"]():
        return None
    sampling, cache = stream_args["sampling"], stream_args["cache"]
    difference = compare_outputs(spec.runner(), token_ids, result.token_ids, ar.token_ids, sampling, cache)
    console.stderr().print()
    console.print_renderable(console.stderr(), comparison_view(result, ar, difference, spec.decode))
    return comparison_json(result, ar, difference)
