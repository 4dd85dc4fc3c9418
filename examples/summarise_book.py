"""Summarises a book of any length: its parts one by one, then the summaries. What was drafted is green.

python examples/summarise_book.py book.txt
python examples/summarise_book.py book.txt --model coder-1.5b.gguf --part 6000 --tokens 200
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

import longdraft
from longdraft.engine.chat import chat_prompt

console = Console(highlight=False, markup=False)


def parts(text: str, tokenizer, size: int) -> Iterator[str]:
    """Pieces of about ``size`` tokens, cut between paragraphs."""
    piece, tokens = [], 0
    for paragraph in text.split("\n\n"):
        length = len(tokenizer(paragraph, verbose=False)["input_ids"])
        if piece and tokens + length > size:
            yield "\n\n".join(piece)
            piece, tokens = [], 0
        piece.append(paragraph)
        tokens += length
    yield "\n\n".join(piece)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path, help="a text in UTF-8")
    parser.add_argument("--model", help="a hub id, a folder or a .gguf file; the embedded model if left out")
    parser.add_argument("--part", type=int, default=3000, help="tokens of a part (3000)")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of a summary (120)")
    args = parser.parse_args()
    model, tokenizer = longdraft.load(args.model)
    spec = longdraft.Speculator(target=model, tokenizer=tokenizer)
    results = []

    def summarise(instruction: str, text: str) -> str:
        run = spec.stream(chat_prompt(tokenizer, instruction, text), max_new_tokens=args.tokens)
        for step in run:
            for piece in step.pieces:
                console.print(piece.text, style="green" if piece.drafted else None, end="")
        results.extend(run.results())
        console.print(f"\n[{results[-1].summary}]\n", style="dim")
        return results[-1].text

    summaries = []
    for number, part in enumerate(parts(args.book.read_text(encoding="utf-8"), tokenizer, args.part), 1):
        console.print(f"Part {number}", style="bold")
        summaries.append(summarise("Summarise this part of a book in a few sentences.", part))
    if len(summaries) > 1:
        console.print("The whole", style="bold")
        summarise("These are summaries of a book's parts. Write one summary of the whole book.", "\n\n".join(summaries))
    drafted, new = sum(sum(r.from_draft) for r in results), sum(r.new_tokens for r in results)
    print(f"{new:,} tokens, of which {drafted / new:.0%} were drafted and found right")


if __name__ == "__main__":
    main()
