"""Turns tokens into text that may be shown now: no halves of characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# A decoder writes this for bytes that are not, or not yet, a character.
REPLACEMENT_CHARACTER = "\ufffd"


class TextDelta(NamedTuple):
    """A piece of text, and whether the token that completed it was drafted."""

    text: str
    drafted: bool


class Detokenizer:
    """Turns a growing list of tokens into text.

    A new text is the difference of two decodings of the same short tail, with and without the new tokens. So a space
    that a tokenizer writes between two tokens, but not before the first, is there.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tail: list[int] = []
        self._shown = 0  # tokens of the tail whose text was returned

    def push(self, token: int) -> str:
        """Returns the text that is certain now; empty while a character lacks bytes."""
        self._tail.append(token)
        text = self._decode(self._tail)
        known = self._decode(self._tail[: self._shown])
        if len(text) <= len(known) or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._tail = self._tail[self._shown :]
        self._shown = len(self._tail)
        return text[len(known) :]

    def finish(self) -> str:
        """Returns the remaining text, broken characters included."""
        text, known = self._decode(self._tail), self._decode(self._tail[: self._shown])
        if not text.startswith(known):  # a broken character has spoiled those before it
            text, known = self._decode(self._tail[self._shown :]), ""
        self._tail, self._shown = [], 0
        return text[len(known) :]


class TextStream:
    """The text of one sequence as pieces that may be shown.

    Args:
        decode: token ids to text.
        stops: strings that end the text; they are not part of it. Text that may be the beginning of one is held.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._tokens = Detokenizer(decode)
        self._stops = [stop for stop in stops if stop]
        self._held: list[TextDelta] = []
        self._stopped = False

    def push(self, tokens: Sequence[int], from_draft: int, last: bool = False) -> list[TextDelta]:
        """Returns the pieces that a step adds, the last step all that was held; ``from_draft`` tokens were drafted."""
        for i, token in enumerate(tokens):
            self._hold(self._tokens.push(token), i < from_draft)
        if last:
            self._hold(self._tokens.finish(), False)
        return self._release(last)

    def _hold(self, text: str, drafted: bool) -> None:
        if text and not self._stopped:
            self._held.append(TextDelta(text, drafted))

    def _release(self, last: bool) -> list[TextDelta]:
        text = "".join(piece.text for piece in self._held)
        stops = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        end = min(stops) if stops else len(text) if last else len(text) - self._suspicious(text)
        released = list[TextDelta]()
        while end > 0:
            piece, drafted = self._held.pop(0)
            released.append(TextDelta(piece[:end], drafted))
            if piece[end:]:
                self._held.insert(0, TextDelta(piece[end:], drafted))
            end -= len(piece)
        if stops:
            self._stopped, self._held = True, []
        return released

    def _suspicious(self, text: str) -> int:
        """Characters at the text's end that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
