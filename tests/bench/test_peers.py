"""The peers: transformers' own ``generate``."""

from __future__ import annotations

import torch

from longdraft import LoadedModel
from longdraft.bench.data import Sample
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from tests.bench import measuring
from tests.bench.measuring import settings
from tests.support.tiny import tiny_model

SAMPLES = [Sample("one two one two " * 4, "", "a", "a:1"), Sample("three four three", "", "a", "a:2")]


def measured(loaded, unpacked=None, **wanted):
    wanted = settings(**({"max_tokens": 16, "repeats": 2} | wanted))
    return measuring.measured(loaded, wanted, SAMPLES, load_dequantized=unpacked)


def test_generate_can_have_a_model_of_its_own(loaded):
    """A dequantized model for peers, needed if ours has quantised weights: loaded once, and only if there are peers."""
    reads = []

    def unpacked():
        reads.append(1)
        return LoadedModel(tiny_model(context=512, layers=2, seed=7).to(torch.bfloat16), loaded.tokenizer)

    bench, found = measured(loaded, unpacked, methods=("hf", "hf-eager"), max_tokens=8)
    assert bench.notes == {"ar": "float32 weights", "hf": "bfloat16 weights", "hf-eager": "bfloat16 weights"}
    assert len(reads) == 1
    assert found[0].rounds["hf"][0].tokens != found[0].rounds["ar"][0].tokens
    Bench(loaded, Settings(methods=("ar",)), load_dequantized=unpacked)
    assert len(reads) == 1


def test_eager_attention_decodes_and_does_not_read_prompts(loaded, monkeypatch):
    """Its scores of a long prompt would not fit into memory."""
    from transformers.models.llama import modeling_llama

    lengths, eager = set(), modeling_llama.eager_attention_forward

    def watched(module, query, *args, **kwargs):
        lengths.add(query.shape[2])
        return eager(module, query, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", watched)
    _, found = measured(loaded, methods=("hf", "hf-eager"), max_tokens=8)
    assert lengths == {1}
    runs = [found[0].cold[name] for name in ("ar", "hf", "hf-eager")]
    assert len({run.tokens for run in runs}) == 1 and all(run.first_token_seconds for run in runs)
