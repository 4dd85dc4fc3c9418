"""Tokens that end a text: those that a model's files state, and those that are known by their text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

# Names that some vocabularies give to other things, as </s> is a mark of HTML: ends if they are special tokens.
_IF_SPECIAL = frozenset(("</s>", "<eos>", "[EOS]", "<PAD>", "[PAD]"))
# The names that families of models give the end of a text, a turn, a message or a call. Models of code begin another
# file or repository with the last eight, or fill up with them.
KNOWN_EOS_TOKENS = frozenset((
    "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>", "<|eot_id|>",
    "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "\u2581<EOT>",
    "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|fim_pad|>", "<fim-pad>",
    "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>", "<REPO>", "<|file_sep|>",
))  # fmt: skip
# Where one of these ends a message, <|end|> only ends a part of it, such as the thoughts.
_OF_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def eos_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokenizer's end token (a chat model's end of turn), and the known ends of its vocabulary."""
    ids: dict[str, int | None] = {
        name: tokenizer.convert_tokens_to_ids(name) for name in KNOWN_EOS_TOKENS | _IF_SPECIAL
    }
    # An unknown name gets the number of the unknown token.
    there = {name for name, i in ids.items() if i is not None and tokenizer.convert_ids_to_tokens(i) == name}
    there -= _IF_SPECIAL - {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special}
    if any(there >= each for each in _OF_MESSAGES):
        there -= {"<|end|>"}
    return frozenset(int(i) for i in (tokenizer.eos_token_id, *map(ids.get, there)) if i is not None)


def config_eos_ids(config: Any) -> list[int]:
    """The end tokens of a configuration, in its order."""
    ids = getattr(config, "eos_token_id", None)
    return [int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]
