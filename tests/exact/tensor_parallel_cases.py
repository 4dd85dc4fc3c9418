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
from tests.support.methods import DRAFTS, Case
from tests.support.methods import METHODS as TABLE
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
    for kind in {case.draft for case in (METHODS | REFUSED).values() if case.draft}:
        DRAFTS[kind](folder / kind, model)


def cases(folder: Path) -> dict[str, Callable[[PreTrainedModel], Any]]:
    """What is decoded of the model ``llama``, by name; what comes out can be written as JSON."""
    found: dict[str, Callable[[PreTrainedModel], Any]] = {}
    for name, case in METHODS.items():
        found[f"{name}, greedy"] = _decoding(folder, case, {})
        found[f"{name}, sampled"] = _decoding(folder, case, SAMPLED)
    return found | {
        "rounded cache": _decoding(folder, Case("prompt-lookup", None, {"kv_dtype": "bfloat16"}), {}),
        "two at a time": _decoding(folder, METHODS["eagle3"], {"batch": 2}),
        "kept cache": lambda model: _kept(model),
        "custom_generate": lambda model: _generated(model, do_sample=False),
        "custom_generate, sampled": lambda model: _generated(model, do_sample=True, temperature=0.9),
    }


SHARED = ("ar", "prompt-lookup", "longspec", "eagle3", "eagle", "small-lm")
METHODS = {name: TABLE[name].with_default_tree() for name in SHARED} | {
    "longspec with lookups": Case("longspec", "longspec kept", {"lookup": True}), "quantspec": Case("quantspec"),
    "tokenswift without a view": Case("tokenswift", "tokenswift", {"view": "none"}),
}  # fmt: skip
REFUSED = {name: TABLE[name] for name in (
    "self", "magicdec", "triforce", "tokenswift", "specextend", "specextend-eagle3"
)} | {"specpv": Case("specpv"), "planned": Case("prompt-lookup", None, {"plan": "auto"})}  # fmt: skip


def speculator(model: PreTrainedModel, folder: Path, case: Case) -> Speculator:
    """Of a case, whose draft is a folder's name."""
    draft = {"draft": folder / case.draft} if case.draft else {}
    return Speculator(case.method, target=model, **draft, **case.options)


def _decoding(folder: Path, case: Case, settings: dict[str, Any]) -> Callable[[PreTrainedModel], Any]:
    def decode(model: PreTrainedModel) -> Any:
        results = speculator(model, folder, case).generate(PROMPTS, max_new_tokens=NEW, **settings)
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
        name: _refusal(lambda case=case: _decoding(folder, case, {})(model))  # type: ignore[misc]
        for name, case in REFUSED.items()
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
