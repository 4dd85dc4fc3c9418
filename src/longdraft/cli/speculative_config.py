"""Translates vLLM's ``--speculative-config`` (JSON) into a method and its options.

vLLM drafts chains of ``num_speculative_tokens``; so does the translation. Without that key, trees have our sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longdraft.options import suggestion

# {vLLM's method: ours}. vLLM has a name of its own for the MTP layers of each model (deepseek_mtp, ...): all are mtp.
_METHODS = {
    "ngram": "prompt-lookup", "ngram_gpu": "prompt-lookup", "suffix": "suffix", "draft_model": "small-lm",
    "eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dflash", "mtp": "mtp",
}  # fmt: skip
_LOOKUPS = ("prompt-lookup", "suffix")
# {key: the option of the lookups that it sets}
_LOOKUP_OPTIONS = {"prompt_lookup_max": "max_n", "prompt_lookup_min": "min_n"}
# Keys about vLLM's own execution, or its own way of counting matches. They do not change the text: ignored.
_IGNORED = (
    "enforce_eager", "draft_tensor_parallel_size", "max_model_len", "moe_backend", "attention_backend",
    "kv_cache_dtype", "disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction",
    "draft_load_config", "draft_sample_method", "dspark_draft_topk", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_spec_factor", "suffix_decoding_max_cached_requests", "suffix_decoding_min_token_prob",
    "use_heterogeneous_vocab",
)  # fmt: skip
# {key: (values that need nothing, why other values are refused)}
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "rejection_sample_method": ((None, "standard"), "longdraft verifies exactly: leave it out"),
    "synthetic_acceptance_rates": ((None,), "longdraft verifies exactly; `bench length` shows what an acceptance pays"),
    "synthetic_acceptance_length": (
        (None,),
        "longdraft verifies exactly; `bench length` shows what an acceptance pays",
    ),
    "quantization": ((None,), "a draft is read in the dtype of its files: use a GGUF or a quantized folder"),
    "revision": ((None, "main"), "download that revision, and name its folder as the model"),
    "code_revision": ((None, "main"), "longdraft runs no code of a draft's folder"),
    "num_speculative_tokens_per_batch_size": ((None,), "the planner chooses the number: leave both numbers out"),
    "enable_adaptive_verification": ((None, False), "--plan auto does this for every method"),
}


def parse_speculative_config(text: str) -> tuple[str | None, dict[str, Any]]:
    """Returns (our method; None: the draft's kind decides; its options) for vLLM's JSON object.

    Raises:
        ValueError: the text is no JSON object, or a key or a value has no counterpart here.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--speculative-config takes a JSON object: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--speculative-config takes a JSON object, not {text!r}")
    config = {key: value for key, value in config.items() if key not in _IGNORED}
    for key in [key for key in config if key in _REFUSED]:
        allowed, advice = _REFUSED[key]
        value = config.pop(key)
        if value not in allowed:
            raise _error(f"{key} {value!r} has no counterpart: {advice}")
    draft = config.pop("model", None)
    if draft is not None and not isinstance(draft, str):
        raise _error(f"model takes a folder, a .gguf file or a hub id, not {draft!r}")
    method = _method(config.pop("method", None), draft, config.pop("parallel_drafting", False))
    options: dict[str, Any] = {}
    num_tokens = config.pop("num_speculative_tokens", None)
    if method in _LOOKUPS:
        options |= {_LOOKUP_OPTIONS[key]: config.pop(key) for key in [*config] if key in _LOOKUP_OPTIONS}
        options |= {} if num_tokens is None else {"max_draft": num_tokens, "branches": 1}
    else:
        options |= {} if draft is None else {"draft": Path(draft)}
        options |= {} if num_tokens is None else {"tree": "chain", "depth": num_tokens}
    if config:
        key = next(iter(config))
        allowed_keys = ("model", "method", "num_speculative_tokens", "parallel_drafting", *_LOOKUP_OPTIONS, *_IGNORED)
        advice = f"{method} does not have it" if key in _LOOKUP_OPTIONS else suggestion(key, allowed_keys)
        raise _error(f"there is no key {key}{f': {advice}' if advice else ''}")
    return method, {name: value for name, value in options.items() if value is not None}


def _method(name: Any, draft: str | None, has_parallel_drafts: bool) -> str | None:
    """Returns our method for vLLM's; None: the draft's folder says its kind."""
    if name is None and draft in ("ngram", "[ngram]"):  # vLLM takes these for the method
        name = "ngram"
    if name is None and draft is None:
        raise _error("give a method or a model")
    if name is None:
        return None
    method = "mtp" if isinstance(name, str) and name.endswith("_mtp") else _METHODS.get(name)
    if has_parallel_drafts:
        method = {"eagle3": "peagle", "dflash": "dflash"}.get(str(method))
    if method is None:
        parallel = "parallel_drafting with " if has_parallel_drafts else ""
        raise _error(f"{parallel}method {name!r} has no counterpart; known: {', '.join(_METHODS)}, and each *_mtp")
    if draft is None and method in ("small-lm", "eagle", "dflash", "peagle"):
        raise _error(f"method {name} needs a model: the draft's folder, .gguf file or hub id")
    return method


def _error(text: str) -> ValueError:
    return ValueError(f"--speculative-config: {text}.")
