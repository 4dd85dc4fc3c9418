"""A drafter of your own in a page: it needs no weights, and whatever it proposes, the output stays the target's.

    python examples/last_seen.py                # beside plain decoding, on the embedded model
    longdraft generate --load examples/last_seen.py --method last-seen --file report.txt -p "Summarise this."

docs/methods.md says what else a drafter may have: options, hidden states, a state of its own, trained weights.
"""

from longdraft import compose
from longdraft.engine.drafter import Drafter
from longdraft.trees.tree import TokenTree


class LastSeen(Drafter):
    """Proposes the tokens that followed the newest token where the text had it before."""

    def __init__(self, depth: int = 4) -> None:  # keyword parameters are options: -o depth=6
        self.max_nodes = depth

    def propose(self, sequences, limit=None):
        return [self.chain(sequence.tokens) for sequence in sequences]

    def chain(self, text):
        places = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
        after = places[-1] + 1 if places else len(text)
        tokens = [text[-1], *text[after : after + self.max_nodes]]  # the root is the newest token
        return TokenTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


compose("last-seen", LastSeen, summary="what followed the newest token before")


def main() -> None:
    import textwrap
    from pathlib import Path

    import longdraft
    from longdraft.engine.chat import chat_prompt

    model, tokenizer = longdraft.load()
    source = Path(textwrap.__file__).read_text(encoding="utf-8")[:6000]
    prompt = chat_prompt(tokenizer, "Repeat the docstring of the class, and say what it does.", source)
    plain, found = (
        longdraft.Speculator(name, target=model, tokenizer=tokenizer, plan="fixed").generate([prompt])[0]
        for name in ("ar", "last-seen")
    )
    print(found.text, plain.summary, found.summary, sep="\n")
    print("The same tokens:", found.token_ids == plain.token_ids)


if __name__ == "__main__":
    main()
