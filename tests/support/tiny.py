"""Tiny models and a tiny tokenizer: real objects of transformers that are made in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

Family = Literal["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "mistral")
_CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
}

SPECIAL = ("<pad>", "<unk>", "<eos>", "<user>", "<assistant>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,;:!?'\"()-_/=+*<>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_model(
    family: Family = "llama",
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 48,
    layers: int = 3,
    vocab: int = 61,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    context: int = 512,
    **over: object,
) -> PreTrainedModel:
    """A random decoder without EOS, whose distributions are neither flat nor one-hot.

    ``heads * head_dim`` differs from ``hidden`` on purpose. Norm weights and biases are random too, so that a test
    notices if one is left out.

    Args:
        over: further options of the family's configuration, e.g. ``attention_bias=True``.
    """
    options = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "tie_word_embeddings": tie,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "mistral":
        options["sliding_window"] = None
    if family.startswith("gemma"):
        # As in Gemma's checkpoints the attention scale comes from the head size; the window is 24.
        options |= {"sliding_window": 24, "query_pre_attn_scalar": head_dim, "rms_norm_eps": 1e-5}
    if family == "gemma3":
        rope = {"rope_type": "default", "rope_theta": 1e4}
        options["rope_parameters"] = {"sliding_attention": rope, "full_attention": rope}
    config = _CONFIGS[family](**(options | over))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    return model.eval()


def generate_tokens(model: PreTrainedModel, prompt: list[int], new: int, **generate_args: Any) -> list[int]:
    """The model's own greedy ``generate`` with a cache; ``more``: further arguments, such as ``custom_generate``."""
    ids = torch.tensor([prompt])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "use_cache": True, **generate_args}
    with torch.no_grad():  # some layers of other packages fail in inference mode
        output = model.generate(input_ids=ids, max_new_tokens=new, **settings)
    return output[0, len(prompt) :].tolist()


def tiny_tokenizer(*, chat: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """A token for each lower-case character: 61 tokens, as :func:`tiny_model` has.

    Args:
        chat: with a chat template and ``<eos>``.
        eos: with an EOS token, ``<eos>``. Without one, only the model's configuration can have one.
    """
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>" if chat or eos else None,
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE if chat else None,
    )


def tiny_folder(folder: Path, chat: bool = True, **sizes: Any) -> Path:
    """A tiny model and its tokenizer as transformers saves them."""
    tiny_model(**sizes).save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)
    return folder
