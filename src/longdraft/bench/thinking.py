"""Questions that are thought about before they are answered (SpecPV, section 4.3).

The first answer is a chain of thought; the next turn asks for the final answer in the form that the data set wants.
The paper does not give its words: these are ours, the same for every data set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from longdraft.bench.data import Sample
from longdraft.errors import CapabilityError
from longdraft.model.chat import follow_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK = "Do not answer yet: first think step by step about what the text says on this."
ANSWER = "Now give the final answer alone, in the form that was asked for."
TURN = 64
"""Tokens that the turn between thought and answer has at most."""


def thoughtful(sample: Sample) -> Sample:
    """The sample, asking for a chain of thought."""
    return replace(sample, instruction="\n\n".join(filter(None, (sample.instruction, THINK))))


def turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the turn that asks for the answer.

    Raises:
        CapabilityError: the chat template has no place for it.
    """
    if not (tokens := follow_up(tokenizer, ANSWER)):
        raise CapabilityError("The model's chat template has no second turn, in which the answer could be asked for.")
    return tokens
