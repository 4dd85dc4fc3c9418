"""Shows what partial verification loses: answers of SpecPV by budget, beside the model's own.

    python examples/partial_verification.py report.txt
    python examples/partial_verification.py report.txt --model coder-1.5b.gguf --context 16000 --budgets 512,4096

A text is green as far as it is the model's own. `specpv` verifies drafts on a part of the KV, so its answer may leave
the model's: the smaller the budget, the sooner, and the less like it the rest is. `longdraft bench quality` measures
that on many texts.
"""

import argparse
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.text import Text

import longdraft
from longdraft.bench.data import Sample, encode_truncated
from longdraft.bench.scores import rouge_l
from longdraft.memory.prompt_cache import PromptCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a text in UTF-8")
    parser.add_argument("--model", help="a hub id, a folder or a .gguf file; the embedded model if left out")
    parser.add_argument("--context", type=int, default=4000, help="tokens of the prompt (4000)")
    parser.add_argument("--budgets", default="256,512,1024,2048", help="rows of KV that are retrieved, by commas")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens at most (128)")
    args = parser.parse_args()
    console = Console(highlight=False, markup=False)
    model, tokenizer = longdraft.load(args.model)
    text = Sample(args.file.read_text(encoding="utf-8"), "Summarise the text above.", "text", str(args.file))
    prompt, cache = encode_truncated(text, tokenizer, args.context), PromptCache()

    def answer(method: str, **options) -> longdraft.Result:
        spec = longdraft.Speculator(method, target=model, tokenizer=tokenizer, **options)
        return spec.generate([prompt], max_new_tokens=args.tokens, cache=cache)[0]

    own, likeness = answer("ar"), rouge_l()
    console.print(f"The model's own answer, {own.tokens_per_second:.1f} tokens/s", style="bold")
    console.print(own.text + "\n")
    for budget in map(int, args.budgets.split(",")):
        found = answer("specpv", drafter="prompt-lookup", budget=budget)
        pairs = zip(own.token_ids, found.token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        console.print(f"Budget {budget:,}: the model's own for {same} tokens", style="bold", end=", ")
        console.print(
            f"ROUGE-L {100 * likeness(own.text, found.text):.0f}, {found.tokens_per_second:.1f} tokens/s", style="bold"
        )
        begin, rest = tokenizer.decode(found.token_ids[:same]), tokenizer.decode(found.token_ids[same:])
        console.print(Text.assemble((begin, "green"), rest, "\n"))


if __name__ == "__main__":
    main()
