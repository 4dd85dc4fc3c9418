"""Builds byte-level BPE tokenizers of GGUF files. The field ``tokenizer.ggml.pre`` names the pre-tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longdraft.model.load.eos_tokens import KNOWN_EOS_TOKENS

_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NORMAL_TYPE, _CONTROL_TYPE, _USER_DEFINED_TYPE = 1, 3, 4  # the last two are matched before pre-tokenization
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # of English contractions
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER_AND_LOWER = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(suffixes)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(suffixes)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_LLAMA3 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
_HAN = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_TEKKEN = _UPPER_AND_LOWER % {"suffixes": "", "digits": ""}
_GPT4O = _UPPER_AND_LOWER % {"suffixes": f"{_SUFFIXES}?", "digits": "{1,3}"}
# llama.cpp's name of a pre-tokenizer -> its regular expressions; each splits the results of the one before.
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
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _KANA, _DEEPSEEK)),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"),
}  # fmt: skip
# Pre-tokenizers with BOS at the start of a text, unless the field add_bos_token says otherwise.
_ADDS_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
# Pre-tokenizers after which a word in the vocabulary becomes one token, whatever the merges say (ignore_merges).
_IGNORES_MERGES = (*_ADDS_BOS, "glm4", "glm5")
_NFC_NORMALIZED = ("qwen2", "qwen35", "command-r", "olmo", "mpt")  # texts are normalized to NFC


def build_tokenizer(field: Callable[[str], Any]) -> PreTrainedTokenizerBase:
    """Builds the tokenizer of a file with ``tokenizer.ggml.model`` gpt2 and one of :data:`PRE_TOKENIZERS`.

    Args:
        field: returns the value of the file's field ``tokenizer.NAME`` for a NAME; None without that field.
    """
    pre_tokenizer = field("ggml.pre")
    tokens = field("ggml.tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in field("ggml.merges"))]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer in _IGNORES_MERGES))
    tokenizer.normalizer = normalizers.NFC() if pre_tokenizer in _NFC_NORMALIZED else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre_tokenizer]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("ggml.token_type") or [_NORMAL_TYPE] * len(tokens)
    for special in (True, False):
        # Some files have the wrong type for the token that ends a turn.
        typed = ((t, _CONTROL_TYPE if t in KNOWN_EOS_TOKENS else kind) for t, kind in zip(tokens, types, strict=False))
        matched = [token for token, kind in typed if kind == (_CONTROL_TYPE if special else _USER_DEFINED_TYPE)]
        added = [AddedToken(token, normalized=False, special=special) for token in matched]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    ids = {role: field(f"ggml.{name}_token_id") for role, name in _SPECIAL_TOKENS.items()}
    bos, adds_bos = ids["bos_token"], field("ggml.add_bos_token")
    if bos is not None and (pre_tokenizer in _ADDS_BOS if adds_bos is None else adds_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="BOS $A",
            pair="BOS $A BOS:1 $B:1",
            special_tokens=[{"id": "BOS", "ids": [int(bos)], "tokens": [tokens[int(bos)]]}],
        )
    special_tokens = {role: tokens[int(token_id)] for role, token_id in ids.items() if token_id is not None}
    handed_over: Any = _HandedOver(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=handed_over, chat_template=field("chat_template"), **special_tokens)


class _HandedOver:
    """A tokenizer whose deep copy is itself: transformers copies what it is given, by way of JSON, in 0.3 seconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._tokenizer
