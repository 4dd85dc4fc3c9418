"""``longdraft batch``: answers a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import longdraft
from longdraft.cli import console, method_options, options
from longdraft.cli.cancel import Cancel
from longdraft.cli.progress import ThroughputBar
from longdraft.errors import CapabilityError, CheckpointError

_BAD_ROWS = 1


def batch(
    *,
    source: Annotated[Path, typer.Argument(metavar="IN", help="Rows: JSON objects with prompt or messages.")],
    answers: Annotated[Path, typer.Argument(metavar="OUT", help="Answers: a line a row, in order.")],
    method: options.Method = None,
    option: options.MethodOptionPairs = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Rows decoded at a time.", show_default="8, 32 on a GPU")
    ] = None,
    context: Annotated[
        int,
        typer.Option(min=0, help="Tokens of text to take memory for at once.", show_default="as rows need it"),
    ] = 0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="New tokens of a row at most, if it does not say.")
    ] = 256,
    choosing: options.SamplingOptions,
    seed: Annotated[int, typer.Option(min=0, help="Row i is sampled with this seed + i.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt, without a chat template.")] = False,
    hosting: method_options.DecodingOptions,
    output: options.OutputOptions,
) -> None:
    """Answer a file of prompts. A run that was ended continues where it was; rows without an answer say why."""
    own = hosting.resolve_options(method, option)

    from longdraft.engine.request import normalize_stop
    from longdraft.engine.session import default_batch_size

    try:
        from longdraft.batch.output import OutputFile
        from longdraft.batch.rows import Defaults, count_and_digest, read_lines
        from longdraft.batch.run import BatchEngine, RunCounts, run
    except ImportError as error:
        raise CapabilityError(
            f'A file of prompts is answered by the server\'s engine: pip install "longdraft[serve]" ({error}).'
        ) from error

    with options.settings_checked():
        sampling = choosing.sampling()
        spec = longdraft.Speculator(method, **hosting.speculator_kwargs, **own)
        defaults = Defaults(max_tokens, sampling, seed, normalize_stop(stop or ()), raw, hosting.model_name)
    if source.resolve() == answers.resolve():
        raise options.SettingError(f"{answers} is the file of prompts: give the answers another name.")
    total, digest = count_and_digest(source)
    if not total:
        raise CheckpointError(f"{source} has no rows: give a file with a JSON object a line.")
    with console.status() as status:
        loaded = hosting.model_options.load(status)
        with options.settings_checked():
            spec.use(loaded.model, loaded.tokenizer)
        engine = BatchEngine(spec, defaults, slots or default_batch_size(spec.runner().device.type), context)
        places = (line.line_number for line in read_lines(source))
        with OutputFile(
            answers, {"input": f"{total} rows, SHA-256 {digest}", **engine.reproducibility_settings}, places
        ) as file:
            if file.rows_at_start:
                console.note(f"{answers}: {file.rows_at_start:,} of {total:,} rows are there; going on behind them.")
            if file.rows_at_start < total:
                engine.prepare(status)
            status.close()
            first = file.rows
            with ThroughputBar("", "rows", total) as bar, Cancel(sigterm=True) as cancel:

                def draw(now: RunCounts) -> None:
                    bar.update(file.rows, now.new_tokens, f", {file.errors} errors" if file.errors else "")

                figures = engine.run_with(lambda: run(read_lines(source, first), file, engine, draw, cancel))
            seconds = bar.seconds
    console.note(
        f"{answers}: {file.rows:,} of {total:,} rows, {file.errors:,} of them errors; {figures.new_tokens:,} new tokens in "
        f"{seconds:,.1f} s, mean accepted length {figures.spec_stats.mean_accepted_length:.2f}."
    )
    output.print_json(
        {
            "rows": total, "written": file.rows, "errors": file.errors, "rows_this_run": figures.rows,
            "new_tokens": figures.new_tokens, "seconds": round(seconds, 3),
            "mean_accepted_length": figures.spec_stats.mean_accepted_length,
        }
    )  # fmt: skip
    if file.rows < total:
        console.note("Cancelled: the same command goes on behind the last row.")
        raise typer.Exit(cancel.exit_code)
    if file.errors:
        raise typer.Exit(_BAD_ROWS)
