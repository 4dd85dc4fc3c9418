"""Trials of two ways to decode: the faster one goes on."""

from __future__ import annotations

import itertools

from longdraft.engine.trial import AGAIN, ROUNDS, Trial


def decode(trial: Trial, speeds: dict[bool, float], tokens: int, plain: float = 1.0) -> list[bool]:
    """Decodes so many tokens; returns the way of each. A cycle is one round of the way off, eight of the way on."""
    taken = []
    for i in range(tokens):
        taken.append(trial.on)
        trial.observe(1, 1 / speeds[trial.on], not trial.on or i % 8 == 7, plain)
    return taken


def test_the_faster_way_goes_on_and_the_other_is_tried_ever_more_seldom():
    for better in (True, False):
        trial = Trial(on=False)
        taken = decode(trial, {better: 2.0, not better: 1.0}, 1000)
        assert not any(taken[:ROUNDS]) and taken[ROUNDS]
        assert taken.count(better) > 900
        tried = [i for i in range(1, 1000) if taken[i] != taken[i - 1] and taken[i] != better]
        pauses = [b - a for a, b in itertools.pairwise(tried)]
        assert pauses and pauses == sorted(pauses) and pauses[0] >= AGAIN


def test_one_that_begins_on_is_held_against_plain_decoding():
    assert decode(Trial(on=True), {True: 0.5, False: 1.0}, 60)[:9] == [True] * 8 + [False]
    assert all(decode(Trial(on=True), {True: 2.0, False: 1.0}, AGAIN))


def test_it_follows_a_text_that_changes():
    trial = Trial(on=False)
    decode(trial, {True: 2.0, False: 1.0}, 300)
    assert trial.on
    assert decode(trial, {True: 0.25, False: 1.0}, 400).count(False) > 200
