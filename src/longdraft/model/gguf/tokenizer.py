"""Byte-level BPE tokenizers of GGUF files, with the pre-tokenizer that the file names (``tokenizer.ggml.pre``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longdraft.model.eos_tokens import KNOWN_EOS_TOKENS

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched before pre-tokenization
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(short)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(short)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARKED = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
_HAN = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_TEKKEN = _CASED % {"short": "", "digits": ""}
_GPT4O = _CASED % {"short": f"{_SHORT}?", "digits": "{1,3}"}
# Name of a pre-tokenizer -> regular expressions, which split one after the other.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("midm-2.0", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "kormo"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("gpt-2", "olmo", "exaone4", "mpt", "trillion", "a.x-4.0", "mellum", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("phi-2", "gigachat"), (_GPT2,)),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _KANA, _MARKED)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
}  # fmt: skip
# Pre-tokenizers whose texts begin with BOS if the file does not say (add_bos_token).
_ADDS_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
# Words in the vocabulary are tokens without merges (ignore_merges).
_IGNORES_MERGES = (*_ADDS_BOS, "glm4", "glm5")
_NFC = ("qwen2", "qwen35", "command-r", "olmo", "mpt")  # with NFC normalization


def build_tokenizer(field: Callable[[str], Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a file with the model gpt2 and one of :data:`PRE_TOKENIZERS`.

    Args:
        field: gives the value of a name behind ``tokenizer.``, or None.
    """
    pre = field("ggml.pre")
    tokens = field("ggml.tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in field("ggml.merges"))]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORES_MERGES))
    tokenizer.normalizer = normalizers.NFC() if pre in _NFC else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("ggml.token_type") or [1] * len(tokens)
    for special in (True, False):
        # Some files have the wrong type for the token that ends a turn.
        typed = ((t, _CONTROL if t in KNOWN_EOS_TOKENS else kind) for t, kind in zip(tokens, types, strict=False))
        matched = [token for token, kind in typed if kind == (_CONTROL if special else _USER_DEFINED)]
        added = [AddedToken(token, normalized=False, special=special) for token in matched]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    ids = {role: field(f"ggml.{name}_token_id") for role, name in _ROLES.items()}
    bos, adds_bos = ids["bos_token"], field("ggml.add_bos_token")
    if bos is not None and (pre in _ADDS_BOS if adds_bos is None else adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="BOS $A",
            pair="BOS $A BOS:1 $B:1",
            special_tokens=[{"id": "BOS", "ids": [int(bos)], "tokens": [tokens[int(bos)]]}],
        )
    special_tokens = {role: tokens[int(token_id)] for role, token_id in ids.items() if token_id is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=field("chat_template"), **special_tokens)
