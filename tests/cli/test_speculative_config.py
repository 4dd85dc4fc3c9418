"""vLLM's --speculative-config: what becomes of it, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longdraft.cli.speculative_config import parse_speculative_config

EAGLE3 = {"model": "user/draft", "method": "eagle3"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**EAGLE3, "num_speculative_tokens": 3}, ("eagle3", {"draft": "user/draft", "tree": "chain", "depth": 3})),
        (EAGLE3, ("eagle3", {"draft": "user/draft"})),
        ({**EAGLE3, "parallel_drafting": True}, ("peagle", {"draft": "user/draft"})),
        ({"model": "user/draft", "draft_tensor_parallel_size": 1}, (None, {"draft": "user/draft"})),
        ({"method": "draft_model", "model": "small.gguf"}, ("small-lm", {"draft": "small.gguf"})),
        ({"method": "dspark", "model": "user/draft", "max_model_len": 2048}, ("dflash", {"draft": "user/draft"})),
        ({"method": "qwen3_next_mtp", "num_speculative_tokens": 2}, ("mtp", {"tree": "chain", "depth": 2})),
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            ("prompt-lookup", {"max_n": 4, "min_n": 2, "max_draft": 5, "branches": 1}),
        ),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, ("prompt-lookup", {"max_n": 4})),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}, ("suffix", {})),
    ],
)
def test_a_configuration_of_vllm_names_our_method(config: dict, expected: tuple) -> None:
    method, options = parse_speculative_config(json.dumps(config))
    assert (method, {name: str(x) if isinstance(x, Path) else x for name, x in options.items()}) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("eagle3", "takes a JSON object"),
        ("[]", "takes a JSON object"),
        ("{}", "give a method or a model"),
        ('{"method": "medusa", "model": "x"}', "method 'medusa' has no counterpart"),
        ('{"method": "draft_model"}', "needs a model"),
        ('{"model": 3}', "model takes a folder"),
        ('{"method": "ngram", "num_speculative_token": 3}', "did you mean num_speculative_tokens?"),
        ('{"method": "eagle3", "model": "x", "prompt_lookup_max": 3}', "eagle3 does not have it"),
        ('{"model": "x", "rejection_sample_method": "synthetic"}', "rejection_sample_method 'synthetic'"),
        ('{"model": "x", "revision": "v2"}', "download that revision"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(config: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        parse_speculative_config(config)


def test_generate_decodes_with_it(generate):
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    ended = generate("-p", "hello hello hello hello", "-n", 12, "--json", "--speculative-config", config)
    assert json.loads(ended.out.splitlines()[-1])["method"] == "prompt-lookup"
    ended = generate("-p", "hello", "--method", "suffix", "--speculative-config", config)
    assert ended.code and "name two methods" in ended.err
