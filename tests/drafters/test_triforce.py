"""TriForce: what a level writes and emits, and what is left of it. That the output is the target's: tests/exact."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Sampling
from longdraft.drafters import self_drafter
from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.triforce import TriForceDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.engine.loop import Engine
from longdraft.engine.sampler import SampleNoise, Sampler
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from tests.drafters.watching import Watching
from tests.support import chi_square
from tests.support.drafts import small_lm
from tests.support.events import run_to_end
from tests.support.forwards import forward
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("small_sizes")
PROMPT = [3, 9, 4, 7, 2, 5] * 8
DRAWN_HARD = Sampling(temperature=0.9, top_k=8, repetition_penalty=1.2)


class Read(SmallLMDrafter):
    """Has read tokens of the text alone, whatever the target refuted, whenever it drafts."""

    def new_tokens(self, s):
        fed = self.fed_token_ids[s.slot]
        assert fed == s.tokens[: len(fed)]
        return super().new_tokens(s)


def small(folder, vocab=11, **options):
    return Read(SmallLMDraft.load(small_lm(folder, vocab)), tree="chain", view="streaming", **options)


def run(drafter, model, prompts, n, sampling):
    sequences = [Sequence(i, list(p), n, greedy=sampling.greedy) for i, p in enumerate(prompts)]
    for i, s in enumerate(sequences):
        draws = SampleNoise(torch.Generator().manual_seed(i))
        s.sampler = Sampler(sampling.greedy, sampling.processors(), draws)
    # A cache of outputs reads a prompt that all have once, so that all are in the first round.
    run_to_end(Engine(TargetRunner(model), drafter, cache=PromptCache()), sequences)
    return sequences


def test_a_level_draws_with_the_draws_to_come(tmp_path):
    """Where it sees what the target sees, all that it drew is drawn."""
    drafter = TriForceDrafter(small(tmp_path, depth=2), SelfDrafter(budget=400), 5)
    (s,) = run(drafter, tiny_model(vocab=11, dtype=torch.float64), [PROMPT], 37, DRAWN_HARD)
    assert s.rounds == 6 and s.accepted == 30


def law(model, prompt, rows, sampling):
    """[root, one, two]: how likely the model, on these rows of the prompt's KV, says two tokens after a root."""
    runner, n, size = TargetRunner(model), len(prompt), model.config.vocab_size
    full, part = runner.new_store(1, n), runner.new_store(1, len(rows) + 2)
    forward(runner, [prompt], full, [0], logits="none")
    for source, copy in ((full.keys, part.keys), (full.values, part.values)):
        copy[:, 0, :, : len(rows)] = source[:, 0, :, rows]
    part.lengths[0] = len(rows)

    def following(*path):
        logits = forward(runner, [list(path)], part, [0], root_positions=[n]).logits[0, -1:]
        return torch.softmax(sampling.processors()(torch.tensor([[*prompt, *path]]), logits), -1)[0].double()

    pairs = [[following(r)[t] * following(r, t) for t in range(size)] for r in range(size)]
    return torch.stack([torch.stack(of_root) for of_root in pairs])


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.2, top_p=0.9)], ids=str)
@pytest.mark.slow
def test_what_a_level_emits_follows_the_level(tmp_path, monkeypatch, sampling):
    """Chi-square of the two tokens that it proposes after the target's first, against its own law on its own rows."""
    monkeypatch.setattr(self_drafter, "MIN_NEW_TOKENS", 0)
    model, prompt, counts = tiny_model(vocab=4, layers=1), [1, 2, 3, 1, 2, 0, 1] * 3, torch.zeros(4, 4, 4)
    level = SelfDrafter(view="streaming", budget=4, sink=1, window=3)
    watching = Watching(TriForceDrafter(small(tmp_path, 4, depth=1), level, 2))
    run(watching, model, [prompt] * 1000, 4, sampling)
    for _, tree in watching.rounds[:1000]:
        root, one, two = tree.tokens
        counts[root, one, two] += 1
    own = law(model, prompt, [0, 18, 19, 20], sampling)
    assert chi_square.p_value(counts, own * counts.sum((1, 2), keepdim=True)) > 0.01
    # The target's own is another one, or this would say nothing.
    theirs = law(model, prompt, list(range(21)), sampling)
    assert chi_square.p_value(counts, theirs * counts.sum((1, 2), keepdim=True)) < 1e-6
