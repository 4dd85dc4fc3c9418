"""Chi-square of whole runs: a model of a small vocabulary through engine, KV store and attention."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from longdraft import Sampling, Speculator
from tests.tiny import tiny_model

PROMPT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1]
DRAWS, BATCH = 20_000, 500


@pytest.mark.slow
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(3.0), Sampling(2.0, top_k=6, top_p=0.98, repetition_penalty=1.3)])
def test_whole_runs_sample_the_targets_distribution(sampling, branches):
    model = tiny_model(vocab=8, layers=1)
    spec = Speculator("prompt-lookup", target=model, branches=branches, min_n=1)
    counts = torch.zeros(8, 8, 8, dtype=torch.double)
    accepted = 0
    for start in range(0, DRAWS, BATCH):
        for r in spec.generate([PROMPT] * BATCH, max_new_tokens=3, sampling=sampling, seed=start):
            counts[tuple(r.token_ids)] += 1
            accepted += r.accepted

    def p(text):
        logits = model(torch.tensor([text])).logits[:, -1]
        return torch.softmax(sampling.processors()(torch.tensor([text]), logits), -1)[0].double()

    expected = torch.zeros_like(counts)
    with torch.no_grad():
        for a in range(8):
            for b in range(8):
                expected[a, b] = p(PROMPT)[a] * p([*PROMPT, a])[b] * p([*PROMPT, a, b])
    expected, counts = expected.flatten() * DRAWS, counts.flatten()
    assert accepted > 1000, "the draft must have been taken for the test to mean something"
    assert counts[expected == 0].sum() == 0
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = wanted > 0
    assert chisquare(observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()).pvalue > 0.01
