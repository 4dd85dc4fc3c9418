"""Draws how many tokens a draft gets accepted a round, against the length of the text.

    python examples/acceptance_by_length.py report.txt
    python examples/acceptance_by_length.py report.txt --model coder-1.5b.gguf --methods prompt-lookup,self \\
        --lengths 1000,4000,16000

`longdraft bench acceptance` does this for many texts, with errors, temperatures and a chart.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

import longdraft
from longdraft.bench.data import Sample, encode_truncated
from longdraft.memory.prompt_cache import PromptCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a text in UTF-8, which is cut to each length")
    parser.add_argument("--model", help="a hub id, a folder or a .gguf file; the embedded model if left out")
    parser.add_argument("--methods", default="longspec,eagle3,specextend,prompt-lookup", help="with commas between")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens of prompts (512,1024,2048,4096)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (64)")
    args = parser.parse_args()
    model, tokenizer = longdraft.load(args.model)
    text = Sample(args.file.read_text(encoding="utf-8"), "Summarise the text above.", "text", str(args.file))
    # plan="fixed": each method's own tree, whatever pays on this machine.
    specs = {name: longdraft.Speculator(name, target=model, plan="fixed") for name in args.methods.split(",")}
    table = Table("prompt", "method", "accepted length", "")
    for length in map(int, args.lengths.split(",")):
        prompt = encode_truncated(text, tokenizer, length)
        layers = {layer for spec in specs.values() for layer in spec.feature_layers()}
        cache = PromptCache(tuple(sorted(layers)))  # the prompt is read once for all
        for name, spec in specs.items():
            (result,) = spec.generate([prompt], max_new_tokens=args.tokens, eos_token_ids=(), cache=cache)
            accepted = result.mean_accepted_length
            table.add_row(f"{len(prompt):,}", name, f"{accepted:.2f}", "█" * round(6 * accepted))
    Console().print(table)


if __name__ == "__main__":
    main()
