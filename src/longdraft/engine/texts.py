"""Prompts to token ids, and token ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from transformers import PreTrainedTokenizerBase

from longdraft.engine.request import Prompt, prompt_of
from longdraft.errors import CapabilityError
from longdraft.model.chat import chat_prompt, encode
from longdraft.model.ends import ends_of


@dataclass(frozen=True)
class Texts:
    """Encodes and decodes with a target's tokenizer; without one, prompts and outputs are token ids."""

    tokenizer: PreTrainedTokenizerBase | None

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of token ids, without special tokens and ends.

        Raises:
            CapabilityError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise CapabilityError("Text needs a tokenizer: Speculator(..., tokenizer=tokenizer).")
        shown = [token for token in tokens if token not in self.eos]  # not all of them are special to a tokenizer
        return str(self.tokenizer.decode(shown, skip_special_tokens=True))

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

    @cached_property
    def eos(self) -> frozenset[int]:
        """The tokens that end a text as far as the tokenizer can say; see :mod:`longdraft.model.ends`."""
        return frozenset() if self.tokenizer is None else ends_of(self.tokenizer)

    def spelled(self, stops: Sequence[str]) -> Callable[[list[int]], str]:
        """Decodes for a search of these texts: with special tokens if one of them has the text of such a token."""
        if self.tokenizer is None:
            raise CapabilityError("Stop strings need a tokenizer: Speculator(..., tokenizer=tokenizer).")
        special = (*self.tokenizer.added_tokens_encoder, *self.tokenizer.convert_ids_to_tokens(sorted(self.eos)))
        if any(token in stop for token in special for stop in stops):
            return partial(self.tokenizer.decode, skip_special_tokens=False)
        return self.decode
