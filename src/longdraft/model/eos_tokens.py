"""End-of-sequence tokens: from a model's files, and by the names that model families give them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

# Ordinary text in some vocabularies (</s> is an HTML tag): these end a sequence only as special tokens.
_EOS_IF_SPECIAL = frozenset(("</s>", "<eos>", "[EOS]", "<PAD>", "[PAD]"))
# Names of the end of a text, a turn, a message or a tool call. Code models begin another file or repository with the
# last eight, or pad with them.
KNOWN_EOS_TOKENS = frozenset((
    "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>", "<|eot_id|>",
    "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "\u2581<EOT>",
    "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|fim_pad|>", "<fim-pad>",
    "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>", "<REPO>", "<|file_sep|>",
))  # fmt: skip
# In vocabularies with one of these sets, <|end|> ends only a part of a message, such as the reasoning.
_MESSAGE_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def eos_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokenizer's EOS token (a chat model's end of turn), and all known EOS tokens in its vocabulary."""
    ids: dict[str, int | None]
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in KNOWN_EOS_TOKENS | _EOS_IF_SPECIAL}
    # Names outside of the vocabulary get the id of the unknown token.
    present = {name for name, i in ids.items() if i is not None and tokenizer.convert_ids_to_tokens(i) == name}
    present -= _EOS_IF_SPECIAL - {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if any(present >= names for names in _MESSAGE_ENDS):
        present -= {"<|end|>"}
    return frozenset(int(i) for i in (tokenizer.eos_token_id, *map(ids.get, present)) if i is not None)


def config_eos_ids(config: Any) -> list[int]:
    """The EOS token ids of a configuration, in its order."""
    ids = getattr(config, "eos_token_id", None)
    return [int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]
