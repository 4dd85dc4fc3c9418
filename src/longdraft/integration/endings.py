"""Ends the rows of a batch as ``generate`` does, though rows decode at their own pace.

``generate`` calls its stopping criteria after each step, with all rows. A finished row goes on with padding only if one
of the criteria is for end-of-sequence tokens; else it goes on with real tokens until every row has finished. And a
criterion may look at all rows, or keep a state.

So criteria that look at a row alone are called as soon as the row has a token, and the row can end there. Any others
are called step by step, with all rows, once the slowest has come as far; tokens of a faster row beyond its end are cut.
A streamer is fed in the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from longdraft.engine.sequence import FinishReason, Sequence
from longdraft.errors import CapabilityError
from longdraft.native.boundary import WHOLE

_OF_A_ROW = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


class Endings:
    """Decides when each row ends, and cuts and pads the output.

    Args:
        sequences: the batch, in the order of its rows.
        prompts: (B, n) token ids, with padding, on the device where criteria want them.
        criteria: of ``generate``.
        pad: the padding token, if there is one.
        streamer: gets each step's tokens (B,), on the host.

    Raises:
        CapabilityError: rows have to be padded, and there is no padding token.
    """

    def __init__(
        self,
        sequences: SequenceOf[Sequence],
        prompts: torch.Tensor,
        criteria: Any,
        pad: int | None = None,
        streamer: Any = None,
    ) -> None:
        self._own = StoppingCriteriaList(c for c in criteria if type(c) in _OF_A_ROW)
        self._joint = StoppingCriteriaList(c for c in criteria if type(c) not in _OF_A_ROW)
        self._padded = any(hasattr(c, "eos_token_id") for c in criteria)  # as generate decides
        if self._padded and pad is None and len(sequences) > 1:
            raise CapabilityError(
                "Rows of a batch that end at an end-of-sequence token are padded, and there is no padding token: give "
                "pad_token_id."
            )
        self._pad, self._streamer, self._text = pad or 0, streamer, prompts
        self._sequences = sequences
        # Tokens of each row up to its end, once that is known. A joint criterion may still find an earlier end.
        self._ends: list[int | None] = [None] * len(sequences)
        self._steps = 0

    def rule(self, s: Sequence) -> FinishReason | None:
        """A stop rule of the engine, called after each emitted token."""
        i, count = s.index, len(s.output)
        if s is not self._sequences[i]:  # a guess, which a schedule may take back
            return "stop" if self._padded and self._ended(s) else None
        if self._ends[i] is None and (not s.remaining or self._ended(s)):
            self._ends[i] = count
        if self._joint or self._streamer is not None:
            while self._step():
                pass
        end = self._ends[i] if self._padded else self._length()
        if end is None or count < end:
            return None
        return "stop" if s.remaining else "length"

    def output(self) -> torch.Tensor:
        """Returns (B, new tokens), when every row has ended."""
        length = self._length()
        assert length is not None
        rows = [[self._token(i, step) for step in range(length)] for i in range(len(self._ends))]
        return torch.tensor(rows, dtype=torch.long, device=self._text.device)

    def _ended(self, s: Sequence) -> bool:
        """True if the last token ends a row by criteria that look at the row alone."""
        return bool(self._own(s.ids()[None], None).all())

    def _length(self) -> int | None:
        """New tokens of the longest row; None if that is not known yet."""
        known = [end for end in self._ends if end is not None]
        return max(known) if len(known) == len(self._ends) else None

    def _token(self, row: int, step: int) -> int | None:
        """A row's token at a step, or padding; None if the row has not come as far."""
        end, s = self._ends[row], self._sequences[row]
        if self._padded and end is not None and step >= end:
            return self._pad
        return s.output[step] if step < len(s.output) else None

    def _step(self) -> bool:
        """Streams and judges the next step, if all rows have reached it and not all have ended before."""
        step, length = self._steps, self._length()
        if length is not None and step >= length:
            return False
        tokens = [t for i in range(len(self._ends)) if (t := self._token(i, step)) is not None]
        if len(tokens) < len(self._ends):
            return False
        self._steps += 1
        if self._streamer is not None:
            self._streamer.put(torch.tensor(tokens, **WHOLE))
        if self._joint:
            self._text = torch.cat([self._text, self._text.new_tensor(tokens)[:, None]], dim=-1)
            ended = self._joint(self._text, None).tolist()
            for i, end in enumerate(self._ends):
                if ended[i] and (end is None or end > self._steps):
                    self._ends[i] = self._steps
        return True
