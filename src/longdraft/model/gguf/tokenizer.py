"""Byte-level tokenizers of GGUF files, which split texts by the rule that the file names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longdraft.model.eos_tokens import KNOWN_EOS_TOKENS

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTROL, _USERS = 3, 4  # types of tokens that are found in texts before they are split
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
# How texts are split into words, by the file's name of it: the expressions are applied one after the other.
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
# Texts begin with BOS, where a file does not say whether they do.
_BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
# Words that are tokens themselves are not merged from their letters.
_WHOLE = (*_BEGUN, "glm4", "glm5")
_COMPOSED = ("qwen2", "qwen35", "command-r", "olmo", "mpt")  # texts are normalised as the authors' tokenizers do


def build_tokenizer(field: Callable[[str], Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a file whose model of words is gpt2 and which names one of :data:`PRE_TOKENIZERS`.

    Args:
        value: gives the value of a name behind ``tokenizer.``, or None.
    """
    split = field("ggml.pre")
    tokens = field("ggml.tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in field("ggml.merges"))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    own = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _WHOLE))
    own.normalizer = normalizers.NFC() if split in _COMPOSED else None
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in PRE_TOKENIZERS[split]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    own.decoder = decoders.ByteLevel()
    types = field("ggml.token_type") or [1] * len(tokens)
    for special in (True, False):
        # Some files say of the end of a turn that it is a word like any other.
        kinds = ((t, _CONTROL if t in KNOWN_EOS_TOKENS else kind) for t, kind in zip(tokens, types, strict=False))
        kept = [token for token, kind in kinds if kind == (_CONTROL if special else _USERS)]
        added = [AddedToken(token, normalized=False, special=special) for token in kept]
        own.add_special_tokens(added) if special else own.add_tokens(added)
    ids = {role: field(f"ggml.{name}_token_id") for role, name in _ROLES.items()}
    begin = ids["bos_token"]
    if begin is not None and (split in _BEGUN if (begun := field("ggml.add_bos_token")) is None else begun):
        own.post_processor = processors.TemplateProcessing(
            single="BOS $A",
            pair="BOS $A BOS:1 $B:1",
            special_tokens=[{"id": "BOS", "ids": [int(begin)], "tokens": [tokens[int(begin)]]}],
        )
    named = {role: tokens[int(number)] for role, number in ids.items() if number is not None}
    return PreTrainedTokenizerFast(tokenizer_object=own, chat_template=field("chat_template"), **named)
