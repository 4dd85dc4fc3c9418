"""``longdraft train data``: generates or encodes training data."""

from __future__ import annotations

from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from longdraft.cli import console, method_options, options
from longdraft.cli.cancel import Cancel
from longdraft.cli.progress import ThroughputBar
from longdraft.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from longdraft.training.answers import AnswerFile
    from longdraft.training.documents import Document, SkipCounts


def data(
    *,
    files: Annotated[
        list[Path],
        typer.Argument(help="JSONL or parquet files, or folders of them: rows with `text`; for tokens, also chats."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSONL file to write or to continue; for tokens, a folder.")
    ] = None,
    show: Annotated[
        int,
        typer.Option(min=0, help="Only print this many rows as the model reads them, with tokens in the loss marked."),
    ] = 0,
    chat_template: Annotated[
        list[str] | None, typer.Option(help="Argument of the chat template, such as enable_thinking=false; repeatable.")
    ] = None,
    kind: Annotated[
        Literal["answers", "tokens"],
        typer.Option(help="answers: a server answers prompts about the texts; tokens: the rows are encoded."),
    ] = "answers",
    url: Annotated[
        str | None, typer.Option(help="URL of a server with OpenAI's API: longdraft serve, vLLM, SGLang, llama.cpp.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-m",
            help="The model's name at the server; for tokens, a Hugging Face id, a folder or a .gguf file.",
            show_default="the server's first model; for tokens, the embedded model",
        ),
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="API key of the server.")] = "",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of rows in --out at the end.", show_default="1000; tokens: all")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Maximum number of new tokens.")] = 256,
    passage_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Tokens of a passage.")] = "200,1500",
    per_passage: Annotated[int, typer.Option(min=1, help="Number of prompts about a passage.")] = 24,
    temperatures: Annotated[str, typer.Option(help="Temperatures, which the answers take in turn.")] = "0,0,1",
    seed: Annotated[int, typer.Option(help="Random seed of passages and prompts; use a new one for each --out.")] = 0,
    output: options.OutputOptions,
) -> None:
    """Prepare training data: answers of a model, or texts and chats encoded as tokens."""
    lengths = method_options.parse_ints("--passage-tokens", passage_tokens)
    answer_temperatures = method_options.parse_floats("--temperatures", temperatures)
    if len(lengths) != 2 or not 0 < lengths[0] <= lengths[1]:
        raise options.SettingError(f"--passage-tokens takes two numbers, such as 200,1500, not {passage_tokens!r}.")
    if not answer_temperatures or min(answer_temperatures) < 0:
        raise options.SettingError("--temperatures takes numbers of at least 0, separated by commas.")
    from longdraft.training.config import parse_template_kwargs

    template = parse_template_kwargs(chat_template or [])
    if show:
        output.print_json({"rows": _show_examples(files, target, show, template)})
        return
    if out is None:
        raise options.SettingError("--out names the file or folder to write; --show 3 only prints rows.")
    to_folder = kind == "tokens"
    if to_folder and (out.is_file() or out.name.endswith(".jsonl")):
        raise options.SettingError(f"--out {out}: tokens are written to a folder: name one, such as text.tokens.")
    if (out.is_dir() and not to_folder) or not out.absolute().parent.is_dir():
        raise CheckpointError(f"--out {out}: name a path in a folder that exists; answers are written to a file.")
    if to_folder and url is not None:
        raise options.SettingError("--url is an option of --kind answers: leave it out.")
    if not to_folder and url is None:
        raise options.SettingError(
            "Answers need a server: start one (`longdraft serve --model MODEL`), and set --url http://127.0.0.1:8000"
        )

    from longdraft.training import documents

    skipped = documents.SkipCounts()
    if url is None:
        (num_rows, cancel), usage = _encode(files, out, target, rows, skipped, template), {}
    else:
        from longdraft.training import answers

        # Files are read first, to report a wrong path at once.
        texts = _read_texts(files, skipped)
        prompts = answers.sample_prompts(texts, (lengths[0], lengths[1]), per_passage, answer_temperatures, seed)
        file, total = answers.AnswerFile(out), rows or 1000
        with Cancel(sigterm=True) as cancel, ThroughputBar("answers", "rows", total) as bar:
            answers.generate_answers(
                prompts, file, url, api_key, target, rows=total, batch=batch, max_new_tokens=max_tokens, stop=cancel,
                template=template,
                progress=lambda: bar.update(file.num_answers, file.new_tokens),
            )  # fmt: skip
        num_rows, usage = file.num_answers, _show_usage(file, bar.seconds)
    if skipped:
        console.note(f"Left out: {skipped}.")
    if cancel():
        console.note("Stopped. The same command continues from there.")
        raise typer.Exit(cancel.exit_code)
    console.note(f"{out}: {num_rows:,} rows. Train on them: longdraft train longspec --config FILE data={out}")
    output.print_json({"out": str(out), "rows": num_rows, "left_out": dict(skipped)} | usage)


def _encode_documents(
    files: list[Path], target: str | None, skipped: SkipCounts, template: dict[str, Any], num_done: int = 0
) -> tuple[Iterator[Document | None], PreTrainedTokenizerBase]:
    """Returns (documents of the rows after the first ``num_done``, the target's tokenizer)."""
    from longdraft.model.load.loading import load
    from longdraft.model.quant.stored import weight_shape
    from longdraft.training import documents

    with console.status() as status:
        model, tokenizer = load(target, device="cpu", progress=status)
    vocab_size = weight_shape(model.get_output_embeddings())[0]
    return documents.encode_documents(files, tokenizer, skipped, vocab_size, num_done, template), tokenizer


def _show_examples(files: list[Path], target: str | None, count: int, template: dict[str, Any]) -> int:
    """Prints up to ``count`` rows as the model reads them, with tokens in the loss marked. Returns their number."""
    from longdraft.training.documents import SkipCounts

    skipped = SkipCounts()
    encoded, tokenizer = _encode_documents(files, target, skipped, template)
    num_shown, out = 0, console.stdout()
    for document in islice(filter(None, encoded), count):
        num_shown += 1
        mask = document.loss_mask or [i >= document.start for i in range(len(document.token_ids))]
        text = Text()
        for in_loss, run in groupby(zip(document.token_ids, mask, strict=True), key=itemgetter(1)):
            part = tokenizer.decode([token for token, _ in run])
            text.append(f"⟦{part}⟧" if in_loss else part, "green" if in_loss else "")
        out.print(Text(f"row {num_shown}: {len(mask):,} tokens, {sum(mask):,} in the loss", style="bold"))
        out.print(text)
    if skipped:
        console.note(f"Left out: {skipped}.")
    return num_shown


def _encode(
    files: list[Path], out: Path, target: str | None, rows: int | None, skipped: SkipCounts, template: dict[str, Any]
) -> tuple[int, Cancel]:
    """Encodes the rows and writes shards. Returns the number of documents that were added, and whether it was ended."""
    from longdraft.training import dataset

    num_done = dataset.num_examples_done(out)
    encoded, tokenizer = _encode_documents(files, target, skipped, template, num_done)
    remaining = islice(encoded, None if rows is None else max(0, rows - num_done))
    with Cancel(sigterm=True) as cancel, ThroughputBar("Encoding", "rows") as bar:
        return dataset.write_shards(out, remaining, tokenizer, bar.update, cancel), cancel


def _read_texts(files: list[Path], skipped: SkipCounts) -> list[tuple[str, str]]:
    """Returns (text, name of its file or folder) of all rows that have text."""
    from longdraft.training import documents

    texts = []
    for source in map(str, files):
        for example in documents.read_examples([source], skipped):
            if example is not None and isinstance(example.get("text"), str):
                texts.append((example["text"], source))
            elif example is not None:
                skipped["without text"] += 1
    return texts


def _show_usage(file: AnswerFile, seconds: float) -> dict[str, Any]:
    """Prints tokens and hours of the answers. Returns them as fields of the JSON object."""
    prompt_tokens, completion_tokens = file.usage
    if file.num_refused:
        console.note(f"{file.num_refused:,} prompts were refused, or answered without text.")
    if file.new_tokens:
        hours, speed = seconds / 3600, file.new_tokens / max(seconds, 1e-9)
        console.note(
            f"{file.new_tokens:,} tokens of answers in {hours:.2f} hours: {speed:,.0f} tokens/s, "
            f"{1e6 * hours / file.new_tokens:.2f} hours for a million."
        )
    console.note(f"The server reports {prompt_tokens:,} prompt tokens and {completion_tokens:,} completion tokens.")
    usage = {"seconds": round(seconds, 3), "usage": file.usage}
    return {"tokens": completion_tokens, "tokens_this_run": file.new_tokens, **usage}
