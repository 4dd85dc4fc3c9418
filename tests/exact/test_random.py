"""Situations that nobody thought of: any method, family, prompts and settings together."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longdraft import PromptCache, Sampling, Speculator
from tests.exact.test_planned import TABLES
from tests.support.methods import CASES, DRAWN, GREEDY, PENALISED, VOCABULARY, target, tokens
from tests.support.tiny import FAMILIES

token = st.integers(0, VOCABULARY - 1)
# A phrase a few times over and something behind it, so that lookups find something.
prompt = st.builds(
    lambda phrase, times, rest: phrase * times + rest,
    st.lists(token, min_size=1, max_size=20),
    st.integers(1, 5),
    st.lists(token, max_size=40),
)
SAMPLINGS = [GREEDY, GREEDY, DRAWN, PENALISED, Sampling(1.0), Sampling(0.7, min_p=0.1, repetition_penalty=1.2)]


@pytest.mark.usefixtures("small_sizes")
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    name=st.sampled_from(list(CASES)),
    family=st.sampled_from(FAMILIES),
    prompts=st.lists(prompt, min_size=1, max_size=3),
    sampling=st.sampled_from(SAMPLINGS),
    n=st.integers(1, 20),
    seed=st.integers(0, 9),
    eos=st.lists(token, max_size=1),
    chunk=st.sampled_from([1024, 16]),
    plan=st.sampled_from(["fixed", "fixed", *TABLES]),
    cached=st.booleans(),
)
def test_any_of_it_is_plain_decoding(spec_factory, name, family, prompts, sampling, n, seed, eos, chunk, plan, cached):
    case, model = CASES[name], target(family)
    given = {"max_new_tokens": n, "sampling": sampling, "seed": seed, "eos_token_ids": eos}
    spec = spec_factory.spec(case, model, plan=TABLES.get(plan, "fixed"))
    found = spec.generate(prompts, cache=PromptCache() if cached else None, piece=chunk, **given)
    assert tokens(found) == tokens(Speculator("ar", target=model).generate(prompts, **given))
