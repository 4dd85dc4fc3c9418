"""Prompts to token ids, and token ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from transformers import PreTrainedTokenizerBase

from longdraft.engine.request import Prompt, normalize_prompt
from longdraft.errors import CapabilityError
from longdraft.model.chat import chat_prompt, encode
from longdraft.model.eos_tokens import eos_ids


@dataclass(frozen=True)
class TextCodec:
    """Encodes and decodes with a target's tokenizer; without one, prompts and outputs are token ids."""

    tokenizer: PreTrainedTokenizerBase | None

    def _needed(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise CapabilityError(f"{what} needs a tokenizer: Speculator(..., tokenizer=tokenizer).")
        return self.tokenizer

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of token ids, without special tokens and ends.

        Raises:
            CapabilityError: there is no tokenizer.
        """
        shown = [
            token for token in tokens if token not in self.eos_token_ids
        ]  # not all of them are special to a tokenizer
        return str(self._needed("Text").decode(shown, skip_special_tokens=True))

    def encode(self, prompt: Prompt, chat: bool = True) -> list[int]:
        """Returns a prompt's token ids; token ids are returned as they are.

        Args:
            chat: wrap a text in the model's chat template, if it has one.

        Raises:
            CapabilityError: the prompt is a text, and there is no tokenizer.
        """
        prompt = normalize_prompt(prompt)
        if not isinstance(prompt, str):
            return prompt
        return (chat_prompt if chat else encode)(self._needed("A text prompt"), prompt)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text as far as the tokenizer can say; see :mod:`longdraft.model.eos_tokens`."""
        return frozenset() if self.tokenizer is None else eos_ids(self.tokenizer)

    def decoder_for_stops(self, stops: Sequence[str]) -> Callable[[list[int]], str]:
        """Decodes for a search of these texts: with special tokens if one of them has the text of such a token."""
        tokenizer = self._needed("A stop string")
        special = (*tokenizer.added_tokens_encoder, *tokenizer.convert_ids_to_tokens(sorted(self.eos_token_ids)))
        if any(token in stop for token in special for stop in stops):
            return partial(tokenizer.decode, skip_special_tokens=False)
        return self.decode
