"""Encodes prompts to token ids, and decodes token ids to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from transformers import PreTrainedTokenizerBase

from longdraft.engine.chat import chat_prompt, encode
from longdraft.engine.request import Prompt, normalize_prompt
from longdraft.errors import CapabilityError
from longdraft.model.load.eos_tokens import eos_ids


@dataclass(frozen=True)
class TextCodec:
    """Encodes and decodes with a target's tokenizer. With None, all prompts and outputs must be token ids."""

    tokenizer: PreTrainedTokenizerBase | None

    def _require_tokenizer(self, feature: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise CapabilityError(f"{feature} needs a tokenizer: give Speculator(..., tokenizer=tokenizer).")
        return self.tokenizer

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of token ids, without special and EOS tokens.

        Raises:
            CapabilityError: there is no tokenizer.
        """
        # A tokenizer may not mark all EOS tokens as special, and skip_special_tokens would keep an unmarked one.
        without_eos = [token for token in tokens if token not in self.eos_token_ids]
        return str(self._require_tokenizer("Text").decode(without_eos, skip_special_tokens=True))

    def encode(self, prompt: Prompt, chat: bool = True) -> list[int]:
        """Returns a prompt's token ids. ``chat`` wraps a string in the tokenizer's chat template, if there is one.

        Raises:
            CapabilityError: the prompt is a string, and there is no tokenizer.
        """
        prompt = normalize_prompt(prompt)
        if not isinstance(prompt, str):
            return prompt
        return (chat_prompt if chat else encode)(self._require_tokenizer("A text prompt"), prompt)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The EOS tokens that the tokenizer names; see :mod:`longdraft.model.load.eos_tokens`."""
        return frozenset() if self.tokenizer is None else eos_ids(self.tokenizer)

    def decoder_for_stops(self, stops: Sequence[str]) -> Callable[[list[int]], str]:
        """Returns a function that decodes token ids to the text in which ``stops`` are searched. The text includes
        special tokens if a stop string contains one."""
        tokenizer = self._require_tokenizer("A stop string")
        special_tokens = (*tokenizer.added_tokens_encoder, *tokenizer.convert_ids_to_tokens(sorted(self.eos_token_ids)))
        if any(token in stop for token in special_tokens for stop in stops):
            return partial(tokenizer.decode, skip_special_tokens=False)
        return self.decode
