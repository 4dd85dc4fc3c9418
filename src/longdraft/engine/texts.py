"""Prompts to token ids, and token ids to text."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from longdraft.engine.request import Prompt, prompt_of
from longdraft.errors import CapabilityError
from longdraft.model.chat import chat_prompt, encode


@dataclass(frozen=True)
class Texts:
    """Encodes and decodes with a target's tokenizer; without one, prompts and outputs are token ids."""

    tokenizer: PreTrainedTokenizerBase | None

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of token ids, without special tokens.

        Raises:
            CapabilityError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise CapabilityError("Text needs a tokenizer: Speculator(..., tokenizer=tokenizer).")
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def encode(self, prompt: Prompt, chat: bool = True) -> list[int]:
        """Returns a prompt's token ids; token ids are returned as they are.

        Args:
            chat: wrap a text in the model's chat template, if it has one.

        Raises:
            CapabilityError: the prompt is a text, and there is no tokenizer.
        """
        prompt = prompt_of(prompt)
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise CapabilityError("A text prompt needs a tokenizer: Speculator(..., tokenizer=tokenizer).")
        return chat_prompt(self.tokenizer, prompt) if chat else encode(self.tokenizer, prompt)

    @property
    def eos(self) -> frozenset[int]:
        """The tokenizer's end token (a chat model's end of turn), if it has one."""
        token = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return frozenset() if token is None else frozenset([int(token)])
