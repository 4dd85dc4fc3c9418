"""Situations that nobody thought of: any method, family, prompts and settings together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import PromptCache, Sampling, Speculator
from longdraft.planning import costs
from tests.events import in_pieces
from tests.exactness.cases import CASES
from tests.exactness.test_planned import TABLES
from tests.exactness.workshop import DRAWN, GREEDY, PENALISED, VOCABULARY, target, tokens
from tests.tiny import FAMILIES

token = st.integers(0, VOCABULARY - 1)
# A phrase a few times over and something behind it, so that lookups find something.
prompt = st.builds(
    lambda phrase, times, rest: phrase * times + rest,
    st.lists(token, min_size=1, max_size=20),
    st.integers(1, 5),
    st.lists(token, max_size=40),
)
SAMPLINGS = [GREEDY, GREEDY, DRAWN, PENALISED, Sampling(1.0), Sampling(0.7, min_p=0.1, repetition_penalty=1.2)]


@settings(max_examples=40)
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
def test_any_of_it_is_plain_decoding(workshop, name, family, prompts, sampling, n, seed, eos, chunk, plan, cached):
    case, model = CASES[name], target(family)
    given = {"max_new_tokens": n, "sampling": sampling, "seed": seed, "eos_token_ids": eos}
    before, costs.table_for = costs.table_for, lambda runner, progress=None, seconds=None: TABLES.get(plan)
    try:
        spec = workshop.spec(case, model, plan="fixed" if plan == "fixed" else "auto")
        run = spec.stream(prompts, cache=PromptCache() if cached else None, **given)
        found = in_pieces(run, chunk).results()
    finally:
        costs.table_for = before
    assert tokens(found) == tokens(Speculator("ar", target=model).generate(prompts, **given))
