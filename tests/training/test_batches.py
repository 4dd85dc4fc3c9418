"""The batch sampler: reproducible, every document once an epoch, equally many batches for every process."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from longdraft.training.batch_sampler import BatchSampler
from longdraft.training.config import LongSpecConfig
from longdraft.training.loop import learning_rate

ROWS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(ROWS, st.integers(1, 120), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_holds_every_document_once(rows, budget, noise, seed, epoch):
    schedule = BatchSampler(rows, LongSpecConfig(rows=budget, seed=seed, epochs=epoch + 1.0), noise)
    first = sum(schedule.steps_per_epoch[:epoch])
    batches = [
        batch for step in range(first, first + schedule.steps_per_epoch[epoch]) for batch in schedule.batches(step)
    ]
    assert {batch.epoch for batch in batches} == {epoch}
    assert sorted(i for b in batches for i in b.documents) == list(range(len(rows)))
    for batch in batches:
        assert len(batch.documents) == 1 or sum(rows[i] for i in batch.documents) <= budget
        assert len(batch.shifts) == len(batch.documents) and set(batch.shifts) <= set(range(1, noise + 1))


@given(ROWS, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.5, 1.0, 1.5, 3.0]))
def test_steps_are_whole_groups_wherever_one_begins(rows, processes, accumulate, epochs):
    def make() -> BatchSampler:
        return BatchSampler(rows, LongSpecConfig(rows=30, seed=7, epochs=epochs, accumulate=accumulate), 4, processes)

    schedule = make()
    forwards = list(map(schedule.batches, range(schedule.steps)))
    fresh = [make().batches(step) for step in range(make().steps)]
    assert forwards == fresh
    width = processes * accumulate
    batches = BatchSampler(rows, LongSpecConfig(rows=30, seed=7), 4).steps
    for batch in fresh:
        assert len(batch) % processes == 0
    if batches >= width and epochs == 1.0:
        assert all(len(b) == width for b in fresh)
        seen = Counter(i for step in fresh for b in step for i in b.documents)
        assert set(seen.values()) <= {1}
        assert len(fresh) == batches // width


def test_the_learning_rate_rises_and_falls():
    config = LongSpecConfig(lr=1.0, warmup=0.1, min_lr=0.2)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and max(rates) == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0.2 < rates[-1] < 0.201
