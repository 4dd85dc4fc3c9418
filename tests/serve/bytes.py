"""A tiny model whose tokens are bytes, so that it can write anything."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import CHAT_TEMPLATE, SPECIAL, tiny_model


def byte_tokenizer(template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate((*SPECIAL, *letters))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>",
        extra_special_tokens=["<user>", "<assistant>"], chat_template=template,
    )  # fmt: skip


def byte_model():
    """The model's vocabulary is a little larger than the tokenizer's, as with real models."""
    return tiny_model(vocab=264, context=1200)
