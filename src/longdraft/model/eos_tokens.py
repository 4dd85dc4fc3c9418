"""End-of-sequence (EOS) tokens: those in a model's files, and those that model families are known to use."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

# Tokens that are EOS only if the tokenizer marks them as special: elsewhere they are plain text (</s> is an HTML tag).
_EOS_IF_SPECIAL = frozenset(("</s>", "<eos>", "[EOS]", "<PAD>", "[PAD]"))
# Tokens that end a text, a turn, a message or a tool call. Code models use those from <|fim_pad|> on as padding, or to
# begin another file or repository.
KNOWN_EOS_TOKENS = frozenset((
    "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>", "<|eot_id|>",
    "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "\u2581<EOT>",
    "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|fim_pad|>", "<fim-pad>",
    "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>", "<REPO>", "<|file_sep|>",
))  # fmt: skip
# In a vocabulary with all tokens of one of these sets, <|end|> ends only a part of a message, such as the reasoning.
_MESSAGE_END_SETS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


def eos_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokenizer's EOS token (a chat model's end of turn) and of all known EOS tokens in its vocabulary."""
    ids: dict[str, int | None]
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in KNOWN_EOS_TOKENS | _EOS_IF_SPECIAL}
    # A name outside of the vocabulary got the id of the unknown token, which converts to another name.
    present = {name for name, i in ids.items() if i is not None and tokenizer.convert_ids_to_tokens(i) == name}
    present -= _EOS_IF_SPECIAL - {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if any(present >= names for names in _MESSAGE_END_SETS):
        present -= {"<|end|>"}
    return frozenset(int(i) for i in (tokenizer.eos_token_id, *map(ids.get, present)) if i is not None)


def config_eos_ids(config: Any) -> list[int]:
    """The EOS token ids of a model's config or generation config, in its order."""
    ids = getattr(config, "eos_token_id", None)
    return [int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None]
