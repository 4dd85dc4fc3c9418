"""Held-out documents, shared out and read when they are needed; features read ahead of their step."""

from __future__ import annotations

import threading

import pytest
import torch

from longdraft.model.runner import TargetRunner
from longdraft.training.ahead import Ahead
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader, LiveFeatures
from longdraft.training.held_out import HeldOut
from longdraft.training.measure import by_step, simulate
from tests.tiny import tiny_model
from tests.training.helpers import checkpoint_tensors, losses_of, same, steps
from tests.training.trainees import READS, make_trainee

CPU = torch.device("cpu")


class Counting(LiveFeatures):
    """Remembers which documents were read, and in which threads."""

    def __init__(self, runner: TargetRunner, documents: int) -> None:
        g = torch.Generator().manual_seed(0)
        made = [Document(torch.randint(0, 61, (20 + i,), generator=g).tolist(), 2) for i in range(documents)]
        super().__init__(FeatureReader(runner, torch.float32, READS["eagle3"]), made, [0] * documents)
        self.read: list[int] = []
        self.threads: set[int] = set()

    def batch(self, documents):
        self.read += documents
        self.threads.add(threading.get_ident())
        return super().batch(documents)


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return TargetRunner(tiny_model())


@pytest.mark.parametrize(("documents", "processes"), [(5, 1), (5, 2), (6, 3), (2, 4)])
def test_processes_share_the_documents_out(runner, documents, processes):
    """Each reads its own; together they measure what one would, in equally many forwards."""
    trainee = make_trainee("eagle3", runner).eval()
    whole = HeldOut(Counting(runner, documents), documents, Ahead(CPU, 0))
    alone = simulate(trainee, whole, 5, by_step)
    counts, reads, forwards = [], [], []
    for rank in range(processes):
        source = Counting(runner, documents)
        share = HeldOut(source, documents, Ahead(CPU, 0), (rank, processes))
        assert len(share) == documents
        forwards.append(0)

        def counting(*arguments, rank=rank):
            forwards[rank] += 1
            return trainee(*arguments)

        simulate(counting, share, 5, by_step, lambda own: counts.append(own) or own)
        reads.append(source.read)
    assert {i for read in reads for i in read} == set(range(documents))
    assert set(map(len, reads)) == set(forwards) == {-(-documents // processes)}
    total = sum(counts)
    assert simulate(trainee, [], 5, by_step, lambda none: none + total) == alone


def test_what_has_no_room_is_read_again(runner):
    size = 20 * 3 * 48 * 4 + 18 * 8  # of the first document: hidden states and likeliest tokens
    source = Counting(runner, 3)
    share = HeldOut(source, 3, Ahead(CPU, 0), room=size)
    first, again = ([features for features, _ in share] for _ in range(2))
    assert source.read == [0, 1, 2, 1, 2]
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_features_come_in_order_and_early(runner, batches):
    source = Counting(runner, 6)
    requests = [(3,), (1, 2), (), (0, 5), (4,)]
    with Ahead(CPU, batches) as ahead:
        made = ahead.read(source, requests)
        found = [next(made)]
        ahead_of = list(ahead.read(source, [(0,)]))  # waits for all that was asked for before
        assert len(source.read) - 2 == len([i for request in requests[1 : 1 + batches] for i in request])
        found += made
    assert [[len(f.tokens) - 20 for f in each] for each in found] == [list(request) for request in requests]
    assert len(ahead_of) == 1 and (threading.get_ident() in source.threads) == (batches == 0)


def test_an_error_while_reading_ahead_is_raised_where_the_features_are_wanted(runner):
    with Ahead(CPU, 2) as ahead:
        made = ahead.read(Counting(runner, 2), [(0,), (7,), (1,)])
        assert len(next(made)) == 1
        with pytest.raises(IndexError):
            next(made)


def test_reading_ahead_and_computing_again_change_nothing(config, tmp_path):
    over = {"measure_every": 3, "epochs": 0.3, "precision": "bf16"}
    for name, new in (("after", {"read_ahead": 0}), ("ahead", {"read_ahead": 2, "recompute": True})):
        last = steps(config("eagle3", out=tmp_path / name, **new, **over))[-1].step
    assert same(checkpoint_tensors(tmp_path / "after", last), checkpoint_tensors(tmp_path / "ahead", last))
    assert losses_of(tmp_path / "after") == losses_of(tmp_path / "ahead")
