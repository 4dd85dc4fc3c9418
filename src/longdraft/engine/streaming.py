"""Incremental detokenization, which returns no incomplete characters and no parts of stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

# Tokenizers write this character for bytes that are not a character, or not yet a complete one.
REPLACEMENT_CHARACTER = "\ufffd"


class TextDelta(NamedTuple):
    """New text, and whether the token that completed it was drafted."""

    text: str
    drafted: bool


class Detokenizer:
    """Incremental detokenizer of one sequence.

    The last tokens are decoded with and without the new one, and the difference is the new text. So the text has the
    spaces that a tokenizer writes between tokens, but not before the first one.

    Args:
        decode: token ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tail_ids: list[int] = []
        self._num_returned = 0  # tokens of _tail_ids whose text was returned

    def push(self, token: int) -> str:
        """Adds a token; returns the new text, which is empty while a character lacks bytes."""
        self._tail_ids.append(token)
        text = self._decode(self._tail_ids)
        returned_text = self._decode(self._tail_ids[: self._num_returned])
        if len(text) <= len(returned_text) or text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._tail_ids = self._tail_ids[self._num_returned :]
        self._num_returned = len(self._tail_ids)
        return text[len(returned_text) :]

    def finish(self) -> str:
        """Returns the remaining text, broken characters included."""
        text, returned_text = self._decode(self._tail_ids), self._decode(self._tail_ids[: self._num_returned])
        if not text.startswith(returned_text):  # an incomplete character has changed the text before it
            text, returned_text = self._decode(self._tail_ids[self._num_returned :]), ""
        self._tail_ids, self._num_returned = [], 0
        return text[len(returned_text) :]


class TextStream:
    """The text of one sequence, in deltas.

    Args:
        decode: token ids to text.
        stop_strings: strings that end the text, and are cut from it. Text that may begin one is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = [stop for stop in stop_strings if stop]
        self._pending: list[TextDelta] = []
        self._stopped = False

    def push(self, tokens: Sequence[int], from_draft: int, is_last: bool = False) -> list[TextDelta]:
        """Returns the new deltas of a step, of whose tokens the first ``from_draft`` were drafted."""
        for i, token in enumerate(tokens):
            self._append_pending(self._detokenizer.push(token), i < from_draft)
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
            delta, drafted = self._pending.pop(0)
            released.append(TextDelta(delta[:end], drafted))
            if delta[end:]:  # the rest of a delta that is released in part
                self._pending.insert(0, TextDelta(delta[end:], drafted))
            end -= len(delta)
        if stop_positions:
            self._stopped, self._pending = True, []
        return released

    def _stop_prefix_len(self, text: str) -> int:
        """Returns how many of the text's last characters begin a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stop_strings):
                return n
        return 0
