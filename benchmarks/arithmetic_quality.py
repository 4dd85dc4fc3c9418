"""Compares the next-token distributions of int8 arithmetic with those of float32 arithmetic on the same weights.

    python benchmarks/arithmetic_quality.py --model coder-0.5b=PATH.gguf [--model NAME=PATH ...] --texts FILE.jsonl...
        [--windows 8] [--decoded] [--skip-ours] [--llama-perplexity PATH/llama-perplexity --unpacked FOLDER]
        [--threads N] [--json OUT]

Texts are cut into windows of 512 tokens. The first half of a window is context only; the rows that predict the tokens
of the second half are scored, 255 in each window, which are the rows that llama-perplexity scores.

mean KL  mean over all scored rows of KL(P || Q) in nats, P by float32 arithmetic and Q by int8 arithmetic
p99      99th percentile of the same numbers
top-1    share of rows in which P and Q have the same most likely token

"ours" loads the file twice with longdraft.load, with arithmetic="float32" and arithmetic="int8". A window is read in
one forward, as a prompt is; with --decoded in forwards of 16 rows, as drafts are verified. "llama.cpp" is
llama-perplexity on the same tokens: P on a copy of the file with every tensor unpacked to float32, its KV in float32
and without flash attention; Q on the file itself with llama.cpp's defaults. The copies are written to the folder
--unpacked once, 4 bytes a weight. llama-perplexity keeps P in 16 bits a token, so a KL below about 1e-5 is noise.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import longdraft
from longdraft.bench import machine
from longdraft.bench.data import read
from longdraft.model.chat import encode
from longdraft.model.runner import TargetRunner

WINDOW, CONTEXT = 512, 256
# Rows of a forward with --decoded.
PIECE = 16
FIGURES = ("mean", "p99", "top1")
# How llama-perplexity prints them.
PRINTED = {"mean": r"Mean\s+KLD:\s+([-\d.]+)", "p99": r"99\.0%\s+KLD:\s+([-\d.]+)", "top1": r"Same top p:\s+([\d.]+)"}

console = Console(width=None if sys.stdout.isatty() else 160)  # tables in a file are as wide as they are


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="JSONL files whose rows have `text`")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 5, 6, 7], help="rows of each file that are used")
    parser.add_argument("--windows", type=int, default=8, help="windows of 512 tokens, spread over the texts")
    parser.add_argument("--decoded", action="store_true", help="read windows in forwards of 16 rows")
    parser.add_argument("--skip-ours", action="store_true")
    parser.add_argument("--llama-perplexity", type=Path)
    parser.add_argument("--unpacked", type=Path, help="a folder for llama.cpp's unpacked files and logits")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.llama_perplexity and args.unpacked is None:
        parser.error("--llama-perplexity needs --unpacked FOLDER, for copies of the files in float32")
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {}
    for name, path in (each.split("=", 1) for each in args.model):
        found[name] = {} if args.skip_ours else {"ours": ours(args, name, Path(path))}
        if args.llama_perplexity:
            found[name]["llama.cpp"] = llama_cpp(args, name, Path(path))
    console.print(shown(found))
    if args.json:
        about = {"hardware": machine.hardware(), "versions": machine.versions(), "settings": str(args)}
        args.json.write_text(json.dumps(about | {"models": found}, indent=1) + "\n", encoding="utf-8")


def shown(found: dict[str, Any]) -> Table:
    kinds = [kind for kind in ("ours", "llama.cpp") if any(kind in each for each in found.values())]
    table = Table("model", *(f"{kind}: {c}" for kind in kinds for c in ("mean KL", "p99", "top-1", "rows")), box=None)
    for name, by_kind in found.items():
        cells = []
        for kind in kinds:
            own = by_kind.get(kind)
            cells += (
                [f"{own['mean']:.5f}", f"{own['p99']:.4f}", f"{own['top1']:.2%}", f"{own['rows']}"] if own else [""] * 4
            )
        table.add_row(name, *cells)
    return table


def text_of(args: Any, tokenizer: Any) -> str:
    """The texts in one string: as many windows from the beginning of each, and one more against what joining loses."""
    samples = [read([file])[row] for file in args.texts for row in args.rows]
    each = -(-(args.windows + 1) // len(samples)) * WINDOW
    pieces = [tokenizer.decode(encode(tokenizer, s.document)[:each], skip_special_tokens=True) for s in samples]
    return "\n\n".join(pieces)


def windows_of(args: Any, tokenizer: Any) -> list[list[int]]:
    """Windows of token ids as llama-perplexity cuts them, each with the BOS token first where the tokenizer adds it."""
    ids = encode(tokenizer, text_of(args, tokenizer))
    if len(ids) < args.windows * WINDOW:
        raise SystemExit(f"The texts give {len(ids) // WINDOW} windows, not {args.windows}: give more or longer ones.")
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(args.windows)]
    if ids[0] == tokenizer.bos_token_id:
        windows = [[ids[0], *window[1:]] for window in windows]
    return windows


def ours(args: Any, name: str, path: Path) -> dict[str, float]:
    """Figures of longdraft's two arithmetics on a file."""
    console.print(f"{name}: ours, {args.windows} windows ...")
    exact = longdraft.load(path, device="cpu", arithmetic="float32", progress=console.print)
    rounded = longdraft.load(path, device="cpu", arithmetic="int8", progress=console.print)
    runners = TargetRunner(exact.model), TargetRunner(rounded.model)
    divergences, same = [], []
    for i, window in enumerate(windows_of(args, exact.tokenizer), 1):
        start = time.perf_counter()
        for p, q in zip(*(scored(runner, window, args.decoded) for runner in runners), strict=True):
            divergences.append(divergence(p, q))
            same.append(p.argmax(-1) == q.argmax(-1))
        console.print(f"  window {i} of {args.windows}: {time.perf_counter() - start:.1f} s")
    return figures(torch.cat(divergences), torch.cat(same))


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) of each row of logits, in nats."""
    exact, other = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (exact.exp() * (exact - other)).sum(-1)


def figures(divergences: torch.Tensor, same: torch.Tensor) -> dict[str, float]:
    return {
        "mean": float(divergences.mean()),
        "p99": float(divergences.quantile(0.99)),
        "top1": float(same.double().mean()),
        "rows": len(same),
    }


def scored(runner: TargetRunner, window: Sequence[int], decoded: bool) -> Iterator[torch.Tensor]:
    """Logits of a window's scored rows, a few rows at a time: a row's are 600 KB with a vocabulary of 150,000."""
    store = runner.new_store(1, len(window))
    size = PIECE if decoded else len(window)
    for start in range(0, len(window), size):
        tokens = window[start : start + size]
        block = store.block([0], [tokens], prompt=not decoded)
        logits = runner.forward(block, store).logits
        store.commit(0, range(len(tokens)))
        assert logits is not None
        rows = logits[0, max(CONTEXT - start, 0) : len(window) - 1 - start]
        yield from rows.split(PIECE)


def llama_cpp(args: Any, name: str, path: Path) -> dict[str, float]:
    """Figures of llama.cpp's arithmetic on a file, by llama-perplexity."""
    folder: Path = args.unpacked
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = folder / f"{path.stem}.f32.gguf"
    if not unpacked.exists():
        console.print(f"{name}: unpacking {path.name} to float32 ...")
        unpack(path, unpacked)
    text, base = folder / f"{path.stem}.txt", folder / f"{path.stem}.logits"
    tokenizer = longdraft.load(path, device="cpu").tokenizer
    text.write_text(text_of(args, tokenizer), encoding="utf-8")
    common = ["-f", text, "-c", WINDOW, "-b", WINDOW, "-t", args.threads, "--chunks", args.windows]
    common += ["--kl-divergence-base", base]
    try:
        console.print(f"{name}: llama.cpp in float32, {args.windows} windows ...")
        perplexity(args, "-m", unpacked, *common, "-ctk", "f32", "-ctv", "f32", "-fa", "off")
        pairs = zip(windows_of(args, tokenizer), tokens_of(base), strict=True)
        if any(own[1:] != theirs[1:] for own, theirs in pairs):
            console.print(f"{name}: llama.cpp's tokens are not ours, so that the figures are of different texts")
        console.print(f"{name}: llama.cpp on the file as it is, {args.windows} windows ...")
        printed = perplexity(args, "-m", path, *common, "--kl-divergence")
    finally:
        base.unlink(missing_ok=True)  # 300 KB a row
    return parsed(printed) | {"rows": args.windows * (WINDOW - CONTEXT - 1)}


def tokens_of(base: Path) -> list[list[int]]:
    """Windows of token ids in a file of logits: 8 bytes, window size, vocabulary, windows, then the ids."""
    size, _, windows = np.fromfile(base, np.int32, 3, offset=8).tolist()
    found: list[list[int]] = np.fromfile(base, np.int32, size * windows, offset=20).reshape(windows, size).tolist()
    return found


def perplexity(args: Any, *arguments: Any) -> str:
    command = [str(args.llama_perplexity), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def parsed(printed: str) -> dict[str, float]:
    """Figures from what llama-perplexity prints of a comparison."""
    matches = {figure: re.search(pattern, printed) for figure, pattern in PRINTED.items()}
    missing = [figure for figure, match in matches.items() if match is None]
    if missing:
        raise SystemExit(f"llama-perplexity printed no {', '.join(missing)}:\n{printed[-2000:]}")
    found = {figure: float(match[1]) for figure, match in matches.items() if match}
    return found | {"top1": found["top1"] / 100}


def unpack(path: Path, out: Path) -> None:
    """Writes a GGUF file with the metadata of another and all its tensors in float32, whole or not at all."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(None, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # which the writer adds
        kind = field.types[0]
        of = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=of)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
    part = out.with_suffix(".part")
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in reader.tensors:  # one at a time: all of them may exceed the memory
            shape = [int(n) for n in reversed(tensor.shape)]
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            writer.write_tensor_data(np.ascontiguousarray(numbers.reshape(shape)))
    finally:
        writer.close()
    part.replace(out)


if __name__ == "__main__":
    sys.exit(main())
