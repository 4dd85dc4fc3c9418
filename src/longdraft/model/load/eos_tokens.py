"""Finds a model's end-of-sequence (EOS) tokens, in its files and in a list of tokens that model families use as EOS."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

# Tokens that are EOS only if the tokenizer marks them as special: elsewhere they are plain text (</s> is an HTML tag).
_EOS_IF_SPECIAL = frozenset(("</s>", "<eos>", "[EOS]", "<PAD>", "[PAD]"))
# Tokens that end a text, a turn, a message or a tool call. From <|fim_pad|> on: code models write these as padding
# behind a text, or to begin another file or repository, so the text has ended there.
KNOWN_EOS_TOKENS = frozenset((
    "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>", "<|eot_id|>",
    "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "\u2581<EOT>",
    "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|fim_pad|>", "<fim-pad>",
    "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>", "<REPO>", "<|file_sep|>",
))  # fmt: skip
# If a vocabulary contains one of these sets, its <|end|> ends only a part of a message, such as the reasoning.
_MESSAGE_END_SETS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def eos_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the ids of the tokenizer's EOS token (a chat model's end of turn) and of known EOS tokens it contains."""
    ids: dict[str, int | None]
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in KNOWN_EOS_TOKENS | _EOS_IF_SPECIAL}
    # A name outside of the vocabulary got the unknown token's id, which converts back to another name.
    present = {name for name, i in ids.items() if i is not None and tokenizer.convert_ids_to_tokens(i) == name}
    present -= _EOS_IF_SPECIAL - {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if any(present >= names for names in _MESSAGE_END_SETS):
        present -= {"<|end|>"}
    return frozenset(int(i) for i in (tokenizer.eos_token_id, *map(ids.get, present)) if i is not None)


def config_eos_ids(config: Any) -> list[int]:
    """Returns the EOS token ids of a model's config or generation config, in the order that it lists them."""
    ids = getattr(config, "eos_token_id", None)
    return [int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]
