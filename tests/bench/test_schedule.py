"""Draft lengths by batch and context, as vLLM's speculative config takes them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from longdraft.bench.acceptance import Accepted, Asked
from longdraft.bench.schedule import schedule
from longdraft.planning.costs import CostTable

# Rows cost nothing up to eight, then each as much as a step; a text of 8,192 tokens doubles all of it.
TABLE = CostTable((64, 8192), (1, 8, 16), ((1.0, 1.0, 9.0), (2.0, 2.0, 10.0)))


def run_of(length, accepted, seconds=1.0, method="m"):
    asked = Asked(method, "{}", "", 0.0, length, None, "a", "a:1", f"{length}")
    pairs = tuple((n, 9) for n in accepted)
    return Accepted(asked, length, sum(accepted) + len(pairs), len(pairs), pairs, seconds * len(pairs))


def accepted_by_vllm(entries, longest):
    """Whether entries fit vLLM's rules: a grid of ranges that begin at 1, leave no gap and do not overlap."""
    for first, last in ((0, 1), (2, 3)):
        ranges = sorted({(entry[first], entry[last]) for entry in entries})
        assert ranges[0][0] == 1 and all(low <= high for low, high in ranges)
        assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))
    cells = len({tuple(e[:2]) for e in entries}) * len({tuple(e[2:4]) for e in entries})
    assert len(entries) == cells and all(0 <= entry[4] <= longest for entry in entries)


def test_a_table_is_of_the_form_that_vllm_takes():
    runs = [run_of(1024, [4, 4, 2]), run_of(4096, [4, 1, 0]), run_of(1024, [9], method="another")]
    made = schedule("m", runs, TABLE, (1, 2, 8))
    assert made is not None and made.contexts == (1024, 4096) and made.batches == (1, 2, 8)
    found = made.as_dict()
    assert found["num_speculative_tokens"] == 4
    accepted_by_vllm(found["num_speculative_tokens_per_batch_size"], 4)
    assert found["by_context"]["1024"] == [[1, 1, 4], [2, 2, made.lengths[1][0]], [3, 8, made.lengths[2][0]]]


def test_drafts_are_as_long_as_pays():
    free = schedule("m", [run_of(64, [4, 4, 4])], TABLE, (1, 4, 16))
    assert free is not None and free.lengths[0] == (4,)  # eight rows cost what one costs
    assert list(free.lengths) == sorted(free.lengths, reverse=True) and free.lengths[-1] < (4,)
    rarely = schedule("m", [run_of(64, [4, 0, 0, 0, 0, 0, 0, 0, 0, 0], seconds=3.0)], TABLE, (1,))
    assert rarely is not None and rarely.lengths == ((0,),)  # drafting takes more than it gives
    assert rarely.as_dict()["num_speculative_tokens"] == 1  # the least that vLLM takes
    # Behind a long text a step costs more, and so does more drafting pay.
    both = schedule("m", [run_of(n, [3, 3, 1], seconds=1.9 + n / 8192) for n in (64, 8192)], TABLE, (1,))
    assert both is not None and both.lengths[0][0] <= both.lengths[0][1]


@pytest.mark.parametrize("runs", [[], [run_of(64, [0, 0])], [run_of(64, [2], method="another")]])
def test_nothing_accepted_is_no_table(runs):
    assert schedule("m", runs, TABLE) is None
