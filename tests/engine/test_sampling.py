"""Sampling settings: what transformers' generate would do with them, and the values they refuse."""

from __future__ import annotations

import pytest
import torch

from longdraft.engine.draws import OwnDraws
from longdraft.engine.sampler import Sampler, Sampling
from tests.tiny import tiny_model

SETTINGS = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.5},
}


def processors_of_generate(**settings):
    """The list that transformers hands to a decoding loop for these settings."""
    model, ids, got = tiny_model(), torch.tensor([[1, 2, 3]]), {}

    def loop(model, input_ids, logits_processor, **kwargs):
        got["processors"] = logits_processor
        return input_ids

    off = {"top_k": 0, "top_p": 1.0}
    model.generate(ids, max_new_tokens=1, custom_generate=loop, **(off | settings))
    return got["processors"]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings_mean_what_they_mean_in_generate(settings):
    text, scores = torch.tensor([[3, 5, 5, 60]]), 3 * torch.randn(1, 61)
    expected = processors_of_generate(do_sample=True, **settings)
    ours = Sampling(**settings).processors()
    assert [type(p) for p in ours] == [type(p) for p in expected]
    assert torch.equal(ours(text, scores.clone()), expected(text, scores.clone()))


def test_greedy_keeps_the_repetition_penalty_and_nothing_else():
    ours = Sampling(0.0, top_k=4, top_p=0.8, min_p=0.1, repetition_penalty=1.5).processors()
    expected = processors_of_generate(do_sample=False, repetition_penalty=1.5)
    assert [type(p) for p in ours] == [type(p) for p in expected]


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}, {"repetition_penalty": 1.0}], ids=str)
def test_a_setting_that_filters_nothing_costs_nothing(off):
    assert len(Sampling(1.0, **off).processors()) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["sampled", "greedy"])
def test_a_value_out_of_its_range_is_refused_at_once(bad, temperature):
    with pytest.raises(ValueError, match=next(iter(bad)).replace("repetition_", "")):
        Sampling(**({"temperature": temperature} | bad))


def test_temperature_zero_is_greedy():
    assert Sampling().greedy and not Sampling(0.01).greedy


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [(Sampling(), True), (Sampling(repetition_penalty=1.2), False), (Sampling(1.0), False)],
    ids=["greedy", "greedy with a penalty", "sampled"],
)
def test_only_greedy_without_processors_is_the_argmax_whatever_the_path(sampling, plain):
    assert Sampler(sampling.greedy, sampling.processors()).plain_greedy == plain


def test_a_pick_is_a_draw_from_the_generator_it_was_given():
    logits, text = torch.randn(61), torch.tensor([1])

    def picks(seed: int) -> list[int]:
        sampler = Sampler(False, Sampling(1.0).processors(), OwnDraws(torch.Generator().manual_seed(seed)))
        torch.manual_seed(int(torch.randint(10**6, ())))  # the global state plays no part
        return [sampler.sample(text, logits) for _ in range(20)]

    assert picks(1) == picks(1) != picks(2)


def test_half_precision_logits_are_drawn_from_in_float32():
    logits = torch.zeros(61, dtype=torch.float16)
    logits[7] = 100.0
    assert Sampler(False, Sampling(1.0).processors()).sample(torch.tensor([1]), logits) == 7
