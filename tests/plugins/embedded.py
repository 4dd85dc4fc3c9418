"""What the suites inside other engines decode: eight prompts with the embedded model."""

from __future__ import annotations

import pytest

import longdraft


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


def accepted_here(loaded, method, prompts, new, **options):
    """Mean accepted length of our own engine's rounds, the bonus counted."""
    spec = longdraft.Speculator(method, loaded.model, plan="fixed", **options)
    found = [spec.generate(prompt, max_new_tokens=new, eos_token_ids=[])[0] for prompt in prompts]
    return 1 + sum(r.accepted for r in found) / sum(r.rounds for r in found)
