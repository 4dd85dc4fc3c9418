"""``longdraft train data``: what drafts learn from."""

from __future__ import annotations

import re
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import longdraft
from longdraft.cli import console, method_options, options
from longdraft.cli.cancel import Cancel
from longdraft.cli.training_display import RowsDisplay
from longdraft.errors import CheckpointError

if TYPE_CHECKING:
    from longdraft.training.answers import AnswerFile
    from longdraft.training.documents import Skipped

# Default number of answers, or of texts that repeat themselves.
ROWS = 1000


class Kind(str, Enum):
    """The kinds of rows that ``train data`` writes."""

    answers = "answers"
    tokens = "tokens"
    repeats = "repeats"


def data(
    *,
    files: Annotated[
        list[Path],
        typer.Argument(help="JSONL, parquet: rows with `text`, for tokens also chats; or a corpus: pg19:FOLDER."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSONL file to write, or to continue; for tokens a folder.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="answers: the target's answers about passages of the text; tokens: the rows, encoded; repeats: texts "
            "of passages and facts that come twice, from which a small language model learns to copy."
        ),
    ] = Kind.answers,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-m",
            help="A Hugging Face id, a folder or a .gguf file; with --url the model's name there.",
            show_default="embedded; with --url the first",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="An OpenAI-compatible server that answers: vLLM, SGLang, llama.cpp, longdraft serve."),
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="For a server that asks for one.")] = "",
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the file in the end: answers or texts.", show_default=f"{ROWS}; tokens: all"),
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="The I-th of N processes that share the passages, a file each.")
    ] = "1/1",
    batch: Annotated[int, typer.Option(min=1, help="Answers decoded, or asked for, at a time.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer, at most.")] = 256,
    passage_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Length of a passage.")] = "200,1500",
    per_passage: Annotated[int, typer.Option(min=1, help="Answers to each passage.")] = 24,
    temperatures: Annotated[str, typer.Option(help="Temperatures of a passage's answers, repeated.")] = "0,0,1",
    seed: Annotated[int, typer.Option(help="Seed of passages, prompts and sampling.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    output: options.Output,
) -> None:
    """Prepare training data: a model's own answers, or text and chats turned into tokens once and for all."""
    lengths = method_options.whole_numbers("--passage-tokens", passage_tokens)
    answer_temperatures = method_options.numbers("--temperatures", temperatures)
    if len(lengths) != 2 or not 0 < lengths[0] <= lengths[1]:
        raise options.SettingError(f"--passage-tokens takes two numbers, as in 200,1500, not {passage_tokens!r}.")
    if not answer_temperatures or min(answer_temperatures) < 0:
        raise options.SettingError("--temperatures takes numbers from 0 on.")
    share = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if share is None or int(share[1]) > int(share[2]):
        raise options.SettingError(f"--part takes the number of a process and of all, as in 1/4, not {part!r}.")
    if kind is not Kind.answers and (url is not None or part != "1/1"):
        raise options.SettingError("--url and --part are for --kind answers.")
    folder = kind is Kind.tokens
    if folder and (out.is_file() or out.name.endswith(".jsonl")):
        raise options.SettingError(f"--out {out}: tokens are written to a folder; name one, as in text.tokens.")
    if (out.is_dir() and not folder) or not out.absolute().parent.is_dir():
        raise CheckpointError(f"--out {out}: its folder does not exist, or it is a folder itself.")

    from longdraft.model.stored import weight_shape
    from longdraft.training import answers, documents, prompts, repeats, served_answers, tokens

    skipped = documents.Skipped()
    if kind is Kind.tokens:
        loaded = _loaded(target, dtype, device, threads)
        vocabulary, done = weight_shape(loaded.model.get_output_embeddings())[0], tokens.rows_done(out)
        with Cancel(terminate=True) as cancel, RowsDisplay("Encoding") as counter:
            encoded = documents.documents(files, loaded.tokenizer, skipped, vocabulary, done)
            left = islice(encoded, None if rows is None else max(0, rows - done))
            have = tokens.write(out, left, loaded.tokenizer, counter.update, cancel)
        if cancel():
            _stopped(cancel, skipped)
        _written(out, have, skipped, {}, output)
        return
    total = ROWS if rows is None else rows
    texts = _texts(files, skipped)  # before the model is loaded, so that a wrong path is reported at once
    if kind is Kind.repeats:
        have = documents.write(repeats.repeats([text for text, _ in texts], total, seed), out)
        _written(out, have, skipped, {}, output)
        return
    asked = prompts.asks(texts, (lengths[0], lengths[1]), per_passage, answer_temperatures, seed)
    passages = islice(enumerate(asked), int(share[1]) - 1, None, int(share[2]))
    file = answers.AnswerFile(out, "tokens" if url is None else "messages", total, url or "the target")
    if url is None:
        loaded = _loaded(target, dtype, device, threads)
        spec = longdraft.Speculator("ar", loaded.model, loaded.tokenizer)
    with Cancel(terminate=True) as cancel, RowsDisplay("answers", total) as display:
        how: dict[str, Any] = {
            "batch": batch, "max_new_tokens": max_tokens, "stop": cancel,
            "progress": lambda: display.update(file.rows, file.added),
        }  # fmt: skip
        if url is None:
            answers.answer(spec, passages, file, seed=seed, **how)
        else:
            served_answers.answer_by_server(passages, file, url, api_key, target, **how)
    if file.refused:
        console.note(f"{file.refused:,} prompts were refused, or answered without text.")
    figures = _told(file, display.seconds)
    if cancel():
        _stopped(cancel, skipped)
    _written(out, file.rows, skipped, figures, output)


def _loaded(target: str | None, dtype: str, device: str | None, threads: int | None) -> longdraft.LoadedModel:
    import torch

    from longdraft.model.loading import load

    if threads:
        torch.set_num_threads(threads)
    with console.status() as status:
        return load(target, dtype=dtype, device=device, progress=status)


def _texts(files: list[Path], skipped: Skipped) -> list[tuple[str, str]]:
    """The texts of files or corpora, each with which of these it is from."""
    from longdraft.training import documents

    texts = []
    for source in map(str, files):
        for row in documents.rows([source], skipped):
            if row is not None and isinstance(row.get("text"), str):
                texts.append((row["text"], source))
            elif row is not None:
                skipped["without text"] += 1
    return texts


def _stopped(cancel: Cancel, skipped: Skipped) -> None:
    if skipped:
        console.note(f"Left out: {skipped}.")
    console.note("Stopped. The same command continues from there.")
    raise typer.Exit(cancel.exit_code)


def _told(file: AnswerFile, seconds: float) -> dict[str, Any]:
    """Tells what the answers took, and where they come from; returns the figures."""
    figures: dict[str, Any] = {"tokens": file.tokens, "tokens_this_run": file.added, "seconds": round(seconds, 3)}
    if file.added:
        hours, speed = seconds / 3600, file.added / max(seconds, 1e-9)
        console.note(
            f"{file.tokens:,} tokens of answers, {file.added:,} of them now in {hours:.2f} hours: {speed:,.0f} "
            f"tokens/s, {1e6 * hours / file.added:.2f} hours a million."
        )
    for name, counts in file.shares.items():
        if any(counts):
            most = ", ".join(f"{name} {100 * n / counts.total():.0f} %" for name, n in counts.most_common(6))
            console.note(f"Tokens by {name}: {most}.")
            figures[f"tokens_by_{name}"] = dict(counts)
    if file.holds == "messages":
        figures["usage"] = file.usage
        console.note(f"The server reports {file.usage[0]:,} tokens read and {file.usage[1]:,} written.")
    return figures


def _written(out: Path, rows: int, skipped: Skipped, figures: dict[str, Any], output: options.Output) -> None:
    if skipped:
        console.note(f"Left out: {skipped}.")
    console.note(f"{out}: {rows:,} rows. Train on them: longdraft train longspec --config FILE data={out}")
    output.json({"out": str(out), "rows": rows, "left_out": dict(skipped)} | figures)
