"""Questions that the model thinks about before it answers (SpecPV, section 4.3).

The first output is a chain of thought; the next turn asks for the answer in the form that the data set wants. The paper
does not give its words: these are longdraft's, and the same for every data set.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from longdraft.bench.data import Sample
from longdraft.engine.chat import apply_chat_template, chat_template_arguments
from longdraft.errors import CapabilityError, PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK = "Do not answer yet: first think step by step about what the text says on this."
ANSWER = "Now give the final answer alone, in the form that was asked for."
MAX_TURN_TOKENS = 64
"""Tokens that the turn between thought and answer has at most."""


def with_thinking(sample: Sample) -> Sample:
    """Returns the sample, asking for a chain of thought."""
    return replace(sample, instruction="\n\n".join(filter(None, (sample.instruction, THINK))))


def answer_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the token ids that end the model's thought and ask for its answer. A tokenizer without a chat template
    gets them as plain text.

    Raises:
        CapabilityError: the chat template has no place for a second turn.
    """
    mark, text = "-*-thought-*-", f"\n\n{ANSWER}\n\n"
    if (arguments := chat_template_arguments(tokenizer)) is not None:
        turns = (("user", "-"), ("assistant", mark), ("user", ANSWER))
        try:
            rendered = apply_chat_template(tokenizer, [{"role": r, "content": c} for r, c in turns], **arguments)
        except PromptError as error:
            raise CapabilityError(f"The answer is asked for in a second turn, and there is none: {error}") from None
        text = str(rendered).partition(mark)[2]
        if not text:
            raise CapabilityError("The model's chat template drops earlier answers, so no second turn can follow one.")
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
