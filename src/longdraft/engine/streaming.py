"""Detokenizes an output token by token. No returned text has incomplete characters or parts of stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Tokenizers write this character for bytes that are no character, or an incomplete character.
REPLACEMENT_CHARACTER = "\ufffd"


class TextDelta(NamedTuple):
    """New text, and whether the token that completed it was drafted."""

    text: str
    drafted: bool


class Detokenizer:
    """Detokenizes one sequence token by token.

    :meth:`push` decodes the last tokens with and without the new token, and the difference is the new text. A token
    decoded alone would lack the space that a tokenizer writes between two tokens, but not before the first token.

    Args:
        decode: converts token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tail_ids: list[int] = []
        self._num_returned = 0  # number of tokens at the start of _tail_ids whose text was returned

    def push(self, token: int) -> str:
        """Adds a token, and returns the new text; an empty string while the last character is incomplete."""
        self._tail_ids.append(token)
        text = self._decode(self._tail_ids)
        returned_text = self._decode(self._tail_ids[: self._num_returned])
        if len(text) <= len(returned_text) or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._tail_ids = self._tail_ids[self._num_returned :]
        self._num_returned = len(self._tail_ids)
        return text[len(returned_text) :]

    def finish(self) -> str:
        """Returns the remaining text, including incomplete characters."""
        text, returned_text = self._decode(self._tail_ids), self._decode(self._tail_ids[: self._num_returned])
        if not text.startswith(returned_text):  # decoding the incomplete character has changed the earlier text
            text, returned_text = self._decode(self._tail_ids[self._num_returned :]), ""
        self._tail_ids, self._num_returned = [], 0
        return text[len(returned_text) :]


class TextStream:
    """Converts the tokens of one sequence to text deltas.

    Args:
        decode: converts token ids to text.
        stop_strings: strings that end the text, and are cut from it. Text that may begin a stop string is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = [stop for stop in stop_strings if stop]
        self._pending: list[TextDelta] = []
        self._stopped = False

    def push(self, tokens: Sequence[int], num_drafted: int, is_last: bool = False) -> list[TextDelta]:
        """Adds the tokens of a step, and returns the new deltas. The first ``num_drafted`` tokens were drafted."""
        for i, token in enumerate(tokens):
            self._append_pending(self._detokenizer.push(token), i < num_drafted)
        if is_last:
            self._append_pending(self._detokenizer.finish(), False)
        return self._release(is_last)

    def _append_pending(self, text: str, drafted: bool) -> None:
        if text and not self._stopped:
            self._pending.append(TextDelta(text, drafted))

    def _release(self, is_last: bool) -> list[TextDelta]:
        """Returns pending text, up to a stop string; text that may begin a stop string stays pending."""
        text = "".join(delta.text for delta in self._pending)
        stop_positions = [position for stop in self._stop_strings if (position := text.find(stop)) >= 0]
        end = len(text) if is_last else len(text) - self._stop_prefix_len(text)
        end = min(stop_positions, default=end)
        released = list[TextDelta]()
        while end > 0:
            delta_text, drafted = self._pending.pop(0)
            released.append(TextDelta(delta_text[:end], drafted))
            if delta_text[end:]:  # only a part of the delta is released
                self._pending.insert(0, TextDelta(delta_text[end:], drafted))
            end -= len(delta_text)
        if stop_positions:
            self._stopped, self._pending = True, []
        return released

    def _stop_prefix_len(self, text: str) -> int:
        """Returns the number of the text's last characters that begin a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stop_strings):
                return n
        return 0
