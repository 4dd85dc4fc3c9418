"""Compares the next-token distributions of int8 arithmetic with those of float32 arithmetic on the same weights.

    python benchmarks/arithmetic_quality.py --model coder-0.5b=PATH.gguf [--model NAME=PATH ...] --texts FILE.jsonl...
        [--windows 8] [--llama-perplexity PATH/llama-perplexity --unpacked FOLDER] [--threads N] [--json OUT]

Texts are cut into windows of 512 tokens. The first half of a window is context only; the rows that predict the tokens
of the second half are scored, 255 in each window, which are the rows that llama-perplexity scores.

mean  mean over all scored rows of KL(P || Q) in nats, P by float32 arithmetic and Q by int8 arithmetic
p99   99th percentile of the same numbers
top1  share of rows in which P and Q have the same most likely token

"ours" loads the file twice with longdraft.load, with arithmetic="float32" and arithmetic="int8", and reads a window in
one forward, as a prompt is. "llama.cpp" is llama-perplexity on the same text: P on a copy of the file with every tensor
unpacked to float32, its KV in float32 and without flash attention; Q on the file itself with llama.cpp's defaults. The
copies are written to the folder --unpacked once, 4 bytes a weight. llama-perplexity keeps P in 16 bits a token, so a KL
below about 1e-5 is noise.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import longdraft
from longdraft.bench import machine
from longdraft.bench.data import read
from longdraft.model.chat import encode
from longdraft.model.runner import TargetRunner

WINDOW, CONTEXT = 512, 256
# How llama-perplexity prints the figures.
PRINTED = {"mean": r"Mean\s+KLD:\s+([-\d.]+)", "p99": r"99\.0%\s+KLD:\s+([-\d.]+)", "top1": r"Same top p:\s+([\d.]+)"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="JSONL files whose rows have `text`")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 5, 6, 7], help="rows of each file that are used")
    parser.add_argument("--windows", type=int, default=8, help="windows of 512 tokens, spread over the texts")
    parser.add_argument("--llama-perplexity", type=Path)
    parser.add_argument("--unpacked", type=Path, help="a folder for llama.cpp's unpacked files and logits")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.llama_perplexity and args.unpacked is None:
        parser.error("--llama-perplexity needs --unpacked FOLDER, for copies of the files in float32")
    torch.set_num_threads(args.threads)
    found: dict[str, dict[str, Any]] = {}
    for name, path in (each.split("=", 1) for each in args.model):
        found[name] = {}
        for who, measure in (("ours", ours), ("llama.cpp", llama_cpp)):
            if who == "ours" or args.llama_perplexity:
                found[name][who] = own = measure(args, Path(path))
                print(f"{name}, {who}:", *(f"{figure} {value:.5g}" for figure, value in own.items()), flush=True)
    if args.json:
        about = {"hardware": machine.hardware(), "versions": machine.versions(), "settings": str(args)}
        args.json.write_text(json.dumps(about | {"models": found}, indent=1) + "\n", encoding="utf-8")


def text_of(args: Any, tokenizer: Any) -> str:
    """The texts in one string: as many windows from the beginning of each, and one more against what joining loses."""
    samples = [read([file])[row] for file in args.texts for row in args.rows]
    each = -(-(args.windows + 1) // len(samples)) * WINDOW
    pieces = [tokenizer.decode(encode(tokenizer, s.document)[:each], skip_special_tokens=True) for s in samples]
    return "\n\n".join(pieces)


def windows_of(args: Any, tokenizer: Any) -> torch.Tensor:
    """Windows of token ids as llama-perplexity cuts them, each with the BOS token first where the tokenizer adds it."""
    ids = encode(tokenizer, text_of(args, tokenizer))
    if len(ids) < args.windows * WINDOW:
        raise SystemExit(f"The texts give {len(ids) // WINDOW} windows, not {args.windows}: give more or longer ones.")
    windows = torch.tensor(ids[: args.windows * WINDOW]).view(args.windows, WINDOW)
    if ids[0] == tokenizer.bos_token_id:
        windows[:, 0] = ids[0]
    return windows


def ours(args: Any, path: Path) -> dict[str, float]:
    """Figures of longdraft's two arithmetics on a file."""
    exact, rounded = (longdraft.load(path, device="cpu", arithmetic=kind) for kind in ("float32", "int8"))
    divergences, same = [], []
    for window in windows_of(args, exact.tokenizer).tolist():
        p, q = (scored(TargetRunner(each.model), window) for each in (exact, rounded))
        divergences.append(divergence(p, q))
        same.append(p.argmax(-1) == q.argmax(-1))
    apart, alike = torch.cat(divergences), torch.cat(same).double()
    p99 = float(apart.quantile(0.99))
    return {"mean": float(apart.mean()), "p99": p99, "top1": float(alike.mean()), "rows": len(apart)}


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) of each row of logits, in nats."""
    exact, other = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (exact.exp() * (exact - other)).sum(-1)


def scored(runner: TargetRunner, window: list[int]) -> torch.Tensor:
    """Logits of a window's scored rows."""
    store = runner.new_store(1, len(window))
    logits = runner.forward(store.block([0], [window], prompt=True), store).logits
    assert logits is not None
    return logits[0, CONTEXT:-1]


def llama_cpp(args: Any, path: Path) -> dict[str, float]:
    """Figures of llama.cpp's arithmetic on a file, by llama-perplexity."""
    args.unpacked.mkdir(parents=True, exist_ok=True)
    unpacked, text, base = (args.unpacked / f"{path.stem}.{kind}" for kind in ("f32.gguf", "txt", "logits"))
    if not unpacked.exists():
        unpack(path, unpacked)
    text.write_text(text_of(args, longdraft.load(path, device="cpu").tokenizer), encoding="utf-8")
    common = ["-f", text, "-c", WINDOW, "-b", WINDOW, "-t", args.threads, "--chunks", args.windows]
    common += ["--kl-divergence-base", base]
    try:
        perplexity(args, "-m", unpacked, *common, "-ctk", "f32", "-ctv", "f32", "-fa", "off")
        printed = perplexity(args, "-m", path, *common, "--kl-divergence")
    finally:
        base.unlink(missing_ok=True)  # 300 KB a row
    matches = {figure: re.search(pattern, printed) for figure, pattern in PRINTED.items()}
    if missing := [figure for figure, match in matches.items() if match is None]:
        raise SystemExit(f"llama-perplexity printed no {', '.join(missing)}:\n{printed[-2000:]}")
    found = {figure: float(match[1]) for figure, match in matches.items() if match}
    return found | {"top1": found["top1"] / 100, "rows": args.windows * (WINDOW - CONTEXT - 1)}


def perplexity(args: Any, *arguments: Any) -> str:
    command = [str(args.llama_perplexity), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def unpack(path: Path, out: Path) -> None:
    """Writes a GGUF file with the metadata of another and all its tensors in float32, whole or not at all."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(None, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # which the writer adds
        of = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
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
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            writer.write_tensor_data(np.ascontiguousarray(numbers.reshape([int(n) for n in reversed(tensor.shape)])))
    finally:
        writer.close()
    part.replace(out)


if __name__ == "__main__":
    main()
