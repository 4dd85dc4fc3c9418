"""LONGSPEC in SGLang's own engine and scheduler, on a CPU, with the embedded model (`sglang_on_cpu` is what stands in).

pip install --no-deps sglang==0.5.23    # and the packages that its modules ask for
python -m pytest --noconftest -c /dev/null --rootdir . tests/engines/in_sglang.py

Greedy text equals that of SGLang without drafts, whatever is cached, retracted or aborted; acceptance is our own engine's.
"""

from __future__ import annotations

from importlib.resources import files

import pytest

import longdraft
from tests.engines.sglang_on_cpu import engine

NEW, NODES = 48, 8
DRAFT = str(files("longdraft") / "drafts/smollm2-135m-instruct-longspec")
LONGSPEC = {
    "speculative_algorithm": "LONGSPEC", "speculative_draft_model_path": DRAFT, "speculative_num_draft_tokens": NODES
}  # fmt: skip


@pytest.fixture(scope="session")
def loaded():
    return longdraft.load(dtype="float32", weights="float32")


@pytest.fixture(scope="session")
def folder(loaded, tmp_path_factory):
    made = tmp_path_factory.mktemp("target")
    loaded.model.save_pretrained(made)
    loaded.tokenizer.save_pretrained(made)
    return str(made)


@pytest.fixture(scope="session")
def prompts(loaded):
    """Eight, of several lengths; the last two begin alike."""
    text = loaded.tokenizer(longdraft.Speculator.__doc__ + longdraft.Speculator.stream.__doc__)["input_ids"]
    text = (text * 4)[:900]
    return [text[i * 7 : i * 7 + n] for i, n in enumerate((20, 60, 130, 250, 400, 90))] + [text[:300], text[:340]]


@pytest.fixture(scope="session")
def plain(folder, prompts):
    return generated(folder, prompts)[0]


def generated(folder, prompts, times=1, **settings):
    """Tokens of each prompt, and what SGLang tells of each."""
    settings = {"max_total_tokens": 8192} | settings
    made = engine(model_path=folder, context_length=1024, max_running_requests=8, page_size=1, **settings)
    try:
        for _ in range(times):
            sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
            found = made.generate(input_ids=prompts, sampling_params=sampling)
    finally:
        made.shutdown()
    return [one["output_ids"] for one in found], [one["meta_info"] for one in found]


def accepted(told):
    """Of a round, the bonus counted."""
    return 1 + sum(t["spec_num_correct_drafts"] for t in told) / sum(t["spec_verify_ct"] for t in told)


def ours(loaded, prompts):
    spec = longdraft.Speculator("longspec", loaded.model, plan="fixed", draft=DRAFT, tree="beam", nodes=NODES - 1)
    found = [spec.generate(prompt, max_new_tokens=NEW, eos_token_ids=[])[0] for prompt in prompts]
    return 1 + sum(r.accepted for r in found) / sum(r.rounds for r in found)


def test_sglangs_own_ngrams(folder, prompts, plain):
    tokens, told = generated(folder, prompts, speculative_algorithm="NGRAM", speculative_num_draft_tokens=NODES)
    assert tokens == plain and accepted(told) > 1


@pytest.mark.parametrize("caching", [True, False])
def test_longspec_with_and_without_the_radix_cache(loaded, folder, prompts, plain, caching):
    tokens, told = generated(folder, prompts, 2, disable_radix_cache=not caching, **LONGSPEC)
    assert tokens == plain and all(bool(t["cached_tokens"]) == caching for t in told)
    expected = ours(loaded, prompts)
    print(f"longspec: {accepted(told):.3f} in SGLang, {expected:.3f} here")
    assert accepted(told) == pytest.approx(expected, rel=0.1)


def test_longspec_where_requests_are_retracted(folder, prompts, plain):
    tokens, told = generated(folder, prompts, max_total_tokens=1900, **LONGSPEC)
    assert tokens == plain and any(t["num_retractions"] for t in told)
