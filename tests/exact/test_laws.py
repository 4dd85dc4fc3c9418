"""Sampled outputs have the target's distribution.

Where a seed gives the output of plain decoding, outputs of many seeds are compared with it. Plain decoding's outputs
are compared with the exact distribution.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from longdraft import Request, Sampling, Speculator
from tests.support import chi_square
from tests.support.methods import METHODS, generate, target, tokens

SIZE, NEW, BATCH = 4, 3, 500
PROMPT = (1, 2, 3, 1, 2, 0, 1) * 2
SAMPLINGS = {
    "hot, top-k": Sampling(2.0, top_k=3),
    "plain": Sampling(1.0),
    "top-p": Sampling(1.2, top_p=0.9),
    "penalised": Sampling(1.5, repetition_penalty=1.3, repetition_window=3),
}


# A small vocabulary, so that each output is likely enough to be counted; one layer for speed.
SMALL = {"vocab": SIZE, "layers": 1}


@cache
def target_distribution(setting: str, vocab: int) -> torch.Tensor:
    """(vocabulary ** NEW,) probability of each output, by transformers' forward."""
    sampling, model = SAMPLINGS[setting], target(vocab=vocab, layers=1)
    found, texts = torch.ones(1, dtype=torch.double), torch.tensor([PROMPT])
    for _ in range(NEW):
        with torch.no_grad():
            scores = sampling.processors()(texts, model(texts).logits[:, -1])
        found = (found[:, None] * torch.softmax(scores, -1).double()).flatten()
        following = torch.arange(vocab).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(vocab, dim=0), following], dim=1)
    return found


def p_value(spec: Speculator, setting: str, draws: int, min_accepted: int = 0, processors: Any = ()) -> float:
    """Chi-square of the joint distribution of the new tokens.

    Args:
        min_accepted: fails if fewer drafted tokens were accepted, since then nothing was tested.
        processors: logits processors of every request.
    """
    vocab = spec.runner().model.config.vocab_size
    counts, accepted = torch.zeros([vocab] * NEW), 0
    for start in range(0, draws, BATCH):
        requests = [Request(list(PROMPT), NEW, SAMPLINGS[setting], start + i, processors) for i in range(BATCH)]
        for r in spec.generate(requests):
            counts[tuple(r.token_ids)] += 1
            accepted += r.accepted
    assert accepted >= min_accepted
    return chi_square.p_value(counts, target_distribution(setting, vocab), cells=8)


def test_plain_decoding_has_the_targets_distribution():
    assert p_value(Speculator("ar", target=target(**SMALL)), "top-p", 1000) > 0.01


class HalfGreedy(LogitsProcessor):
    """Makes every second token the most probable one."""

    def __call__(self, text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = scores == scores.amax(-1, keepdim=True)
        return scores.masked_fill(~best, -torch.inf) if torch.rand(()) < 0.5 else scores


def test_another_distribution_is_rejected():
    """The chi-square test detects it in complete outputs."""
    spec = Speculator("prompt-lookup", target=target(**SMALL), min_n=1)
    assert p_value(spec, "plain", 1000, min_accepted=200, processors=(HalfGreedy(),)) < 1e-6


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize(("name", "setting"), zip(list(METHODS)[1:], cycle(["hot, top-k", "penalised"]), strict=False))
def test_a_seed_gives_plain_decodings_text(spec_factory, name, setting):
    """Many short texts, a seed each."""
    model, prompts = target(vocab=SIZE), (PROMPT * 2,) * 40
    results = generate(spec_factory.spec(METHODS[name], model), prompts, 4, SAMPLINGS[setting])
    assert tokens(results) == spec_factory.plain(model, prompts, 4, SAMPLINGS[setting])
    assert sum(r.accepted for r in results) > 10, "the draft must have been taken for this to mean something"


@pytest.mark.slow
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("setting", ["hot, top-k", "penalised"])
def test_many_draws(setting, branches):
    spec = Speculator("prompt-lookup", target=target(vocab=8, layers=1), branches=branches, min_n=1)
    assert p_value(spec, setting, 20_000, min_accepted=1000) > 0.01
