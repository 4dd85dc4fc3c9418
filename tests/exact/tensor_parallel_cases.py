"""What :mod:`tests.exact.test_tensor_parallel` has decoded: by one process alone, and by each of several.

Under torchrun --nproc-per-node 2 -m tests.exact.tensor_parallel_cases FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from longdraft import LongdraftError, PromptCache, Speculator
from tests.support import drafts
from tests.support.tiny import Family, tiny_model

PROMPTS = [[5, 9, 7, 11, 5, 9, 7, 11, 5, 9], list(range(3, 40)), [8] * 5]
NEW = 12
SAMPLED = {"temperature": 0.9, "top_k": 20, "seed": 5}
# Names of models, by which their folders go: families, one with tied ends, and one whose heads are not shared evenly.
FAMILIES: dict[str, Family] = {"llama": "llama", "tied": "qwen2", "norms": "qwen3"}


def make(folder: Path) -> None:
    """Writes models and drafts."""
    for name, family in FAMILIES.items():
        tiny_model(family, layers=5, tie=name == "tied").save_pretrained(folder / name)
    tiny_model(heads=6, kv_heads=3).save_pretrained(folder / "odd")
    model = tiny_model(layers=5)
    drafts.random_draft(folder / "longspec", model)
    drafts.random_draft(folder / "trimmed", model, kept=list(range(0, 61, 2)))
    drafts.random_eagle3(folder / "eagle3", model)
    drafts.random_heads(folder / "heads", model)
    drafts.random_onepass(folder / "onepass", model)
    drafts.published_eagle(folder / "eagle", model)
    drafts.small_lm(folder / "lm", vocab=61)


def cases(folder: Path) -> dict[str, Callable[[PreTrainedModel], Any]]:
    """What is decoded of the model ``llama``, by name; what comes out can be written as JSON."""
    found: dict[str, Callable[[PreTrainedModel], Any]] = {}
    for name, options in METHODS.items():
        found[f"{name}, greedy"] = _decoding(folder, options, {})
        found[f"{name}, sampled"] = _decoding(folder, options, SAMPLED)
    return found | {
        "rounded cache": _decoding(folder, {"method": "prompt-lookup", "kv_dtype": "bfloat16"}, {}),
        "cache on disk": _decoding(folder, {"method": "longspec", "draft": "longspec", "offload": "disk"}, {}),
        "two at a time": _decoding(folder, {"method": "eagle3", "draft": "eagle3"}, {"batch": 2}),
        "kept cache": lambda model: _kept(model),
        "custom_generate": lambda model: _generated(model, do_sample=False),
        "custom_generate, sampled": lambda model: _generated(model, do_sample=True, temperature=0.9),
    }


METHODS: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    "prompt-lookup": {"method": "prompt-lookup"},
    "longspec": {"method": "longspec", "draft": "longspec"},
    "longspec with lookups": {"method": "longspec", "draft": "trimmed", "lookup": True},
    "eagle3": {"method": "eagle3", "draft": "eagle3"},
    "eagle": {"method": "eagle", "draft": "eagle"},
    "heads": {"method": "heads", "draft": "heads"},
    "onepass": {"method": "onepass", "draft": "onepass"},
    "small-lm": {"method": "small-lm", "draft": "lm"},
    "quantspec": {"method": "quantspec"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "self": {"method": "self"},
    "magicdec": {"method": "magicdec"},
    "triforce": {"method": "triforce", "draft": "lm"},
    "tokenswift": {"method": "tokenswift", "draft": "heads"},
    "specextend": {"method": "specextend", "draft": "lm"},
    "specpv": {"method": "specpv"},
    "retrieval": {"method": "longspec", "draft": "longspec", "retrieval": True},
    "planned": {"method": "prompt-lookup", "plan": "auto"},
}


def speculator(model: PreTrainedModel, folder: Path, options: dict[str, Any]) -> Speculator:
    """Of a case's options, whose draft is a folder's name."""
    named = {"draft": folder / options["draft"]} if "draft" in options else {}
    return Speculator(target=model, **(options | named))


def _decoding(folder: Path, options: dict[str, Any], settings: dict[str, Any]) -> Callable[[PreTrainedModel], Any]:
    def decode(model: PreTrainedModel) -> Any:
        results = speculator(model, folder, options).generate(PROMPTS, max_new_tokens=NEW, **settings)
        return [[r.token_ids, r.rounds, r.drafted, r.accepted] for r in results]

    return decode


def _kept(model: PreTrainedModel) -> Any:
    """Two turns of a chat, the second on the first one's KV."""
    spec, cache = Speculator("prompt-lookup", target=model), PromptCache()
    (first,) = spec.generate([PROMPTS[1]], max_new_tokens=NEW, cache=cache)
    (second,) = spec.generate([PROMPTS[1] + first.token_ids + [4, 2]], max_new_tokens=NEW, cache=cache)
    return [first.token_ids, second.token_ids, second.cached_tokens]


def _generated(model: PreTrainedModel, **settings: Any) -> Any:
    torch.manual_seed(3)
    spec = Speculator("prompt-lookup", target=model)
    ids = torch.tensor([PROMPTS[0]])
    return model.generate(ids, custom_generate=spec, max_new_tokens=NEW, **settings).tolist()


def _refusal(decode: Callable[[], Any]) -> str:
    try:
        decode()
    except LongdraftError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def decode_shared(folder: Path) -> dict[str, Any]:
    """What one of several processes gets."""

    def load(name: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder / name, distributed_config=DistributedConfig(tp_plan="auto"))

    model = load("llama")
    rank = torch.distributed.get_rank()
    found = {name: decode(model) for name, decode in cases(folder).items()}
    for name in FAMILIES:
        found[name] = _decoding(folder, METHODS["ar"], {})(load(name))
    spec = Speculator("prompt-lookup", target=model)
    found["kv heads"] = spec.runner().kv_shape.kv_heads
    found["unseeded"] = [r.token_ids for r in spec.generate(PROMPTS, max_new_tokens=NEW, temperature=1.0)]
    torch.manual_seed(rank)
    ids = torch.tensor([PROMPTS[0]])
    found["unseeded, custom_generate"] = model.generate(
        ids, custom_generate=spec, max_new_tokens=NEW, do_sample=True
    ).tolist()
    refused = {
        name: _refusal(lambda options=options: _decoding(folder, options, {})(model))  # type: ignore[misc]
        for name, options in REFUSED.items()
    }
    refused["odd"] = _refusal(lambda: Speculator("ar", target=load("odd")))
    return found | {"refused": refused}


def main() -> None:
    folder = Path(sys.argv[1])
    found = decode_shared(folder)
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
