"""The embedded model and eight prompts, for tests inside other engines."""

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
    """Eight prompts of several lengths; the last two begin alike."""
    text = loaded.tokenizer(longdraft.Speculator.__doc__ + longdraft.Speculator.stream.__doc__)["input_ids"]
    text = (text * 4)[:900]
    return [text[i * 7 : i * 7 + n] for i, n in enumerate((20, 60, 130, 250, 400, 90))] + [text[:300], text[:340]]


def assert_accepted_as_here(accepted, loaded, method, prompts, new, **options):
    """Compares an engine's mean accepted length, with the bonus token, to that of our own engine."""
    spec = longdraft.Speculator(method, loaded.model, plan="fixed", **options)
    results = [spec.generate(prompt, max_new_tokens=new, eos_token_ids=[])[0] for prompt in prompts]
    expected = 1 + sum(r.accepted for r in results) / sum(r.rounds for r in results)
    print(f"{method}: accepted length {accepted:.3f}, {expected:.3f} here")
    assert accepted == pytest.approx(expected, rel=0.1)
