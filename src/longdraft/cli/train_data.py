"""``longdraft train data``: what drafts learn from."""

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
        typer.Argument(help="JSONL, parquet, or a folder of these: rows with `text`, for tokens also chats."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSONL file to write, or to continue; for tokens a folder.")
    ] = None,
    show: Annotated[
        int, typer.Option(min=0, help="Only print so many rows as the model sees them, with what is learned marked.")
    ] = 0,
    chat_template: Annotated[
        list[str] | None, typer.Option(help="A setting of the chat template, as in enable_thinking=false; repeatable.")
    ] = None,
    kind: Annotated[
        Literal["answers", "tokens"],
        typer.Option(help="answers: a server's answers about passages of the text; tokens: the rows, encoded."),
    ] = "answers",
    url: Annotated[
        str | None,
        typer.Option(help="The OpenAI-compatible server that answers: longdraft serve, vLLM, SGLang, llama.cpp."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-m",
            help="The model's name at the server; for tokens a Hugging Face id, a folder or a .gguf file.",
            show_default="the first there; for tokens the embedded one",
        ),
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="For a server that asks for one.")] = "",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of the file in the end.", show_default="1000; tokens: all")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Answers asked for at a time.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer, at most.")] = 256,
    passage_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Length of a passage.")] = "200,1500",
    per_passage: Annotated[int, typer.Option(min=1, help="Answers to each passage.")] = 24,
    temperatures: Annotated[str, typer.Option(help="Temperatures of a passage's answers, repeated.")] = "0,0,1",
    seed: Annotated[int, typer.Option(help="Seed of passages and prompts; another one for each process.")] = 0,
    output: options.OutputOptions,
) -> None:
    """Prepare training data: a model's own answers, or text and chats turned into tokens once and for all."""
    lengths = method_options.parse_ints("--passage-tokens", passage_tokens)
    answer_temperatures = method_options.parse_floats("--temperatures", temperatures)
    if len(lengths) != 2 or not 0 < lengths[0] <= lengths[1]:
        raise options.SettingError(f"--passage-tokens takes two numbers, as in 200,1500, not {passage_tokens!r}.")
    if not answer_temperatures or min(answer_temperatures) < 0:
        raise options.SettingError("--temperatures takes numbers from 0 on.")
    from longdraft.training.config import parse_template_kwargs

    template = parse_template_kwargs(chat_template or [])
    if show:
        output.print_json({"rows": _shown(files, target, show, template)})
        return
    if out is None:
        raise options.SettingError("--out names the file or folder to write; --show 3 only prints rows.")
    folder = kind == "tokens"
    if folder and (out.is_file() or out.name.endswith(".jsonl")):
        raise options.SettingError(f"--out {out}: tokens are written to a folder; name one, as in text.tokens.")
    if (out.is_dir() and not folder) or not out.absolute().parent.is_dir():
        raise CheckpointError(f"--out {out}: its folder does not exist, or it is a folder itself.")
    if folder and url is not None:
        raise options.SettingError("--url is for --kind answers.")
    if not folder and url is None:
        raise options.SettingError(
            "A server answers: start one, as with `longdraft serve --model MODEL`, and name it: --url http://127.0.0.1:8000"
        )

    from longdraft.training import documents

    skipped = documents.SkipCounts()
    if url is None:
        have, figures = _encoded(files, out, target, rows, skipped, template), {}
    else:
        from longdraft.training import answers

        # Read before the server is asked, so that a wrong path is reported at once.
        texts = _texts(files, skipped)
        asked = answers.sample_prompts(texts, (lengths[0], lengths[1]), per_passage, answer_temperatures, seed)
        file, total = answers.AnswerFile(out), rows or 1000
        with Cancel(sigterm=True) as cancel, ThroughputBar("answers", "rows", total) as display:
            answers.generate_answers(
                asked, file, url, api_key, target, rows=total, batch=batch, max_new_tokens=max_tokens, stop=cancel,
                template=template,
                progress=lambda: display.update(file.num_answers, file.new_tokens),
            )  # fmt: skip
        have, figures = file.num_answers, _told(file, display.seconds)
        _end_if(cancel, skipped)
    if skipped:
        console.note(f"Left out: {skipped}.")
    console.note(f"{out}: {have:,} rows. Train on them: longdraft train longspec --config FILE data={out}")
    output.print_json({"out": str(out), "rows": have, "left_out": dict(skipped)} | figures)


def _documents(
    files: list[Path], target: str | None, skipped: SkipCounts, template: dict[str, Any], done: int = 0
) -> tuple[Iterator[Document | None], PreTrainedTokenizerBase]:
    """The documents of the files' rows after the first ``done``, and the tokenizer."""
    from longdraft.model.loading import load
    from longdraft.model.stored import weight_shape
    from longdraft.training import documents

    with console.status() as status:
        model, tokenizer = load(target, device="cpu", progress=status)
    size = weight_shape(model.get_output_embeddings())[0]
    return documents.encode_documents(files, tokenizer, skipped, size, done, template), tokenizer


def _shown(files: list[Path], target: str | None, count: int, template: dict[str, Any]) -> int:
    """Prints rows as the model sees them; returns how many. Learned tokens lie between marks, green on a terminal."""
    from longdraft.training.documents import SkipCounts

    skipped = SkipCounts()
    encoded, tokenizer = _documents(files, target, skipped, template)
    shown, out = 0, console.stdout()
    for document in islice(filter(None, encoded), count):
        shown += 1
        learned = document.loss_mask or [i >= document.start for i in range(len(document.token_ids))]
        text = Text()
        for own, run in groupby(zip(document.token_ids, learned, strict=True), key=itemgetter(1)):
            part = tokenizer.decode([token for token, _ in run])
            text.append(f"⟦{part}⟧" if own else part, "green" if own else "")
        out.print(Text(f"row {shown}: {len(learned):,} tokens, {sum(learned):,} learned", style="bold"))
        out.print(text)
    if skipped:
        console.note(f"Left out: {skipped}.")
    return shown


def _encoded(
    files: list[Path], out: Path, target: str | None, rows: int | None, skipped: SkipCounts, template: dict[str, Any]
) -> int:
    """Writes the rows as tokens; returns how many this run has added."""
    from longdraft.training import dataset

    done = dataset.num_examples_done(out)
    encoded, tokenizer = _documents(files, target, skipped, template, done)
    left = islice(encoded, None if rows is None else max(0, rows - done))
    with Cancel(sigterm=True) as cancel, ThroughputBar("Encoding", "rows") as counter:
        have = dataset.write_shards(out, left, tokenizer, counter.update, cancel)
    _end_if(cancel, skipped)
    return have


def _texts(files: list[Path], skipped: SkipCounts) -> list[tuple[str, str]]:
    """The texts of files or folders, each with which of these it is from."""
    from longdraft.training import documents

    texts = []
    for source in map(str, files):
        for row in documents.read_examples([source], skipped):
            if row is not None and isinstance(row.get("text"), str):
                texts.append((row["text"], source))
            elif row is not None:
                skipped["without text"] += 1
    return texts


def _end_if(cancel: Cancel, skipped: SkipCounts) -> None:
    """Ends the command if it was cancelled."""
    if not cancel():
        return
    if skipped:
        console.note(f"Left out: {skipped}.")
    console.note("Stopped. The same command continues from there.")
    raise typer.Exit(cancel.exit_code)


def _told(file: AnswerFile, seconds: float) -> dict[str, Any]:
    """Tells what the answers took; returns the figures."""
    read, written = file.usage
    if file.num_refused:
        console.note(f"{file.num_refused:,} prompts were refused, or answered without text.")
    if file.new_tokens:
        hours, speed = seconds / 3600, file.new_tokens / max(seconds, 1e-9)
        console.note(
            f"{file.new_tokens:,} tokens of answers in {hours:.2f} hours: {speed:,.0f} tokens/s, "
            f"{1e6 * hours / file.new_tokens:.2f} hours a million."
        )
    console.note(f"The server reports {read:,} tokens read and {written:,} written.")
    return {"tokens": written, "tokens_this_run": file.new_tokens, "seconds": round(seconds, 3), "usage": file.usage}
