"""Every method, with every option that drafts otherwise, writes what plain decoding writes: greedy, and with a seed.

A ragged batch of four prompts; of sampled ones two are decoded once more on their own.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.support.methods import (
    CASES,
    DRAWN,
    GREEDY,
    METHODS,
    PENALISED,
    PROMPTS,
    SEED,
    VARIANTS,
    generate,
    rounds,
    target,
    tokens,
)
from tests.support.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("small_sizes")
# Methods meet both, the others one of them in turn.
RAGGED = [(name, sampling) for name in METHODS for sampling in (GREEDY, DRAWN)]
RAGGED += zip(VARIANTS, cycle([GREEDY, DRAWN]), strict=False)


@pytest.mark.parametrize(("name", "sampling"), RAGGED)
def test_a_ragged_batch(spec_factory, name, sampling):
    case = CASES[name]
    spec = spec_factory.spec(case)
    together = generate(spec, sampling=sampling)
    assert tokens(together) == spec_factory.plain(sampling=sampling)
    assert {(r.method, r.exact) for r in together} == {(case.method, True)}
    drafted, accepted = sum(r.drafted for r in together), sum(r.accepted for r in together)
    assert drafted >= accepted > 0 or name == "ar"
    assert drafted > accepted or name in ("ar", "quantspec under lookups")  # a level that sees all
    # Slots share nothing, and they end one by one.
    for i in (0, 2) if sampling is DRAWN else ():
        (one,) = generate(spec, (PROMPTS[i],), sampling=sampling, seed=SEED + i)
        assert one.token_ids == together[i].token_ids
        if case.batch_invariant:
            assert rounds([one]) == rounds([together[i]])


@pytest.mark.parametrize(("name", "family"), zip(METHODS, cycle(FAMILIES[1:]), strict=False))
def test_other_families_with_penalties_that_see_a_nodes_own_path(spec_factory, name, family):
    """Greedy with processors: no node's token is known before the walk comes there."""
    model = target(family)
    results = generate(spec_factory.spec(METHODS[name], model), sampling=PENALISED)
    assert tokens(results) == spec_factory.plain(model, sampling=PENALISED)
    assert sum(r.drafted for r in results) > sum(r.accepted for r in results) > 0 or name == "ar"
