"""``longdraft batch``: answers the prompts of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import longdraft
from longdraft.cli import console, method_options, options
from longdraft.cli.cancel import Cancel
from longdraft.cli.progress import ThroughputBar
from longdraft.errors import CheckpointError, needs_extra

_EXIT_ROW_ERRORS = 1  # exit code if a prompt has no answer


def batch(
    *,
    in_path: Annotated[Path, typer.Argument(metavar="IN", help="JSONL file: rows with `prompt` or `messages`.")],
    out_path: Annotated[Path, typer.Argument(metavar="OUT", help="JSONL file to write: answers in the same order.")],
    method: options.Method = None,
    option: options.MethodOptionPairs = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Number of prompts decoded at a time.", show_default="8, 32 on a GPU")
    ] = None,
    context: Annotated[
        int,
        typer.Option(min=0, help="Tokens of KV cache to allocate at the start.", show_default="as prompts need it"),
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Maximum number of new tokens, if a row sets none.")
    ] = 256,
    sampling_options: options.SamplingOptions,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the first prompt; prompt i has seed + i.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this string; repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt, without a chat template.")] = False,
    decoding: method_options.DecodingOptions,
    output: options.OutputOptions,
) -> None:
    """Answer the prompts of a file. A stopped run can be continued. A prompt that fails gets an error as its answer."""
    method, method_args = decoding.resolve(method, option)

    from longdraft.engine.request import normalize_stop
    from longdraft.engine.session import default_batch_size

    with needs_extra("serve", "longdraft batch needs the packages of the server"):
        from longdraft.batch.output import OutputFile
        from longdraft.batch.rows import Defaults, count_and_digest, read_lines
        from longdraft.batch.run import BatchEngine, RunCounts, run

    with options.settings_checked():
        sampling = sampling_options.sampling()
        spec = longdraft.Speculator(method, **decoding.speculator_kwargs, **method_args)
        defaults = Defaults(max_tokens, sampling, seed, normalize_stop(stop or ()), raw, decoding.model_name)
    if in_path.resolve() == out_path.resolve():
        raise options.SettingError(f"{out_path} is the file of prompts: name another file for the answers.")
    total, digest = count_and_digest(in_path)
    if not total:
        raise CheckpointError(f"{in_path} has no rows: name a file with a JSON object on each line.")
    with console.status() as status:
        loaded = decoding.model_options.load(status)
        with options.settings_checked():
            spec.use(loaded.model, loaded.tokenizer)
        engine = BatchEngine(spec, defaults, slots or default_batch_size(spec.runner().device.type), context)
        # A run continues an output file only if the header is the same.
        header = {"input": f"{total} rows, SHA-256 {digest}", **engine.reproducibility_settings}
        line_numbers = (line.line_number for line in read_lines(in_path))  # to check the rows that are done
        with OutputFile(out_path, header, line_numbers) as file:
            if file.num_rows_at_start:
                console.note(
                    f"{out_path}: {file.num_rows_at_start:,} of {total:,} rows are done; continuing after them."
                )
            if file.num_rows_at_start < total:
                spec.planner(status)  # measures the cost of verifications, if the planner of draft trees needs it
            status.close()
            remaining_rows = read_lines(in_path, file.num_rows)
            with ThroughputBar("", "rows", total) as bar, Cancel(sigterm=True) as cancel:

                def show_progress(counts: RunCounts) -> None:
                    bar.update(
                        file.num_rows, counts.num_new_tokens, f", {file.num_errors} errors" if file.num_errors else ""
                    )

                counts = engine.run_with(lambda: run(remaining_rows, file, engine, show_progress, cancel))
            seconds = bar.seconds
    mean_accepted_length = counts.spec_stats.mean_accepted_length
    console.note(
        f"{out_path}: {file.num_rows:,} of {total:,} rows, {file.num_errors:,} of them errors; "
        f"{counts.num_new_tokens:,} new tokens in {seconds:,.1f} s, mean accepted length {mean_accepted_length:.2f}."
    )
    output.print_json(
        {
            "rows": total, "written": file.num_rows, "errors": file.num_errors, "rows_this_run": counts.num_rows,
            "new_tokens": counts.num_new_tokens, "seconds": round(seconds, 3),
            "mean_accepted_length": mean_accepted_length,
        }
    )  # fmt: skip
    if file.num_rows < total:
        console.note("Cancelled. The same command continues after the last row.")
        raise typer.Exit(cancel.exit_code)
    if file.num_errors:
        raise typer.Exit(_EXIT_ROW_ERRORS)
