"""LongSpec for SGLang without SGLang: fed from made-up pools, it drafts the trees that our own engine drafts."""

from __future__ import annotations

import itertools
import random
from array import array
from types import SimpleNamespace

import pytest
import torch

from longdraft import Speculator
from longdraft.drafters import longspec as longspec_draft
from longdraft.drafters.longspec import LongSpecDrafter
from longdraft.errors import CapabilityError, CheckpointError
from longdraft_engines.sglang.drafting import Drafting, rows
from longdraft_engines.sglang.plugin import config
from tests.support.drafts import random_draft
from tests.support.tiny import tiny_model, tiny_tokenizer

LONGEST, PAGE, NODES, ROUNDS = 160, 4, 20, 5
MODEL = tiny_model(context=LONGEST)
TEXTS = [[1 + (i * k) % 50 for i in range(n)] * 2 for k, n in ((3, 9), (7, 30), (1, 5))]


class Engine:
    """SGLang's pools as a worker sees them, with places at random."""

    def __init__(self, paged, seed, cached=None):
        c, self.rng = MODEL.config, random.Random(seed)
        self.paged, self.free = paged, list(range(1, 200))
        shape = (200, c.num_key_value_heads, PAGE) if paged else (200 * PAGE, c.num_key_value_heads)
        self.keys, self.values = torch.full((2, *shape, c.head_dim), torch.nan).unbind()
        self.model_config = SimpleNamespace(
            context_len=LONGEST, head_dim=c.head_dim, hf_text_config=c,
            get_total_num_kv_heads=lambda: c.num_key_value_heads,
        )  # fmt: skip
        self.model = MODEL
        last = {c.num_hidden_layers - 1: (self.keys, self.values)}
        self.token_to_kv_pool = SimpleNamespace(
            get_key_buffer=lambda layer: last[layer][0], get_value_buffer=lambda layer: last[layer][1]
        )
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(9, LONGEST, dtype=torch.int32))
        self.held, self.cached = {}, cached or {}

    def batch(self, names, texts, prompts, hidden):
        """Requests, their rows in the table, and the last ``hidden[name]`` tokens of each, which their outputs lack."""
        for gone in set(self.held) - set(names):
            self.free += self.held.pop(gone)
        found, taken = [], self.rng.sample(range(9), len(names))
        for name, row in zip(names, taken, strict=True):
            text, mine = texts[name], self.held.setdefault(name, [])
            while len(mine) * PAGE < len(text):
                mine.append(self.free.pop(self.rng.randrange(len(self.free))))
            places = [mine[i // PAGE] * PAGE + i % PAGE for i in range(len(text) - 1)]
            self.write(self.cached[name], places)
            self.req_to_token_pool.req_to_token[row, : len(places)] = torch.tensor(places)
            prompt, shown = prompts[name], len(text) - hidden[name]
            output = array("q", text[len(prompt) : shown])
            found.append(SimpleNamespace(rid=name, origin_input_ids_unpadded=array("q", prompt), output_ids=output))
        return found, torch.tensor(taken), [texts[n][len(texts[n]) - hidden[n] :] for n in names]

    def write(self, cached, places):
        for buffer, new in zip((self.keys, self.values), cached, strict=True):
            for i, place in enumerate(places):
                there = buffer[place // PAGE, :, place % PAGE] if self.paged else buffer[place]
                there.copy_(new[:, i])


@pytest.fixture(scope="module", autouse=True)
def without_rounding():
    """Our kernels round activations, so that the last bits of a key tell in log-probabilities; torch's do not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(longspec_draft, "serves", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return random_draft(tmp_path_factory.mktemp("draft"), MODEL, window=12)


@pytest.fixture(scope="module")
def ours(draft):
    """Our engine's rounds on each text (emitted tokens, the next round's tree), and the last layer's KV by text."""
    cached, rounds, propose = {}, [], LongSpecDrafter.propose

    def recorded(self, sequences, budget=None):
        (s,) = sequences
        keys, values = self.store.layer(self.store.shape.layers - 1)
        n = self.store.lengths[s.slot]
        cached[str(len(rounds))] = keys[s.slot, :, :n].clone(), values[s.slot, :, :n].clone()
        return propose(self, sequences, budget)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LongSpecDrafter, "propose", recorded)
        spec = Speculator("longspec", MODEL, tiny_tokenizer(), plan="fixed", draft=draft, nodes=NODES - 1)
        for text in TEXTS:
            steps = [s for s in spec.stream([text], max_new_tokens=40) if s.token_ids]
            rounds.append([(s.token_ids, later.tree) for s, later in itertools.pairwise(steps)][:ROUNDS])
    return rounds, cached


@pytest.mark.parametrize(("paged", "overlap", "away"), [(False, False, 0.0), (True, True, 0.0), (False, True, 0.4)])
def test_trees_are_those_of_our_engine(draft, ours, paged, overlap, away):
    (expected, cached), rng = ours, random.Random(1)
    engine = Engine(paged, 0, cached)
    drafting = Drafting(engine, str(draft), NODES, 3)
    prompts = {str(i): text for i, text in enumerate(TEXTS)}
    texts = {name: list(text) for name, text in prompts.items()}
    left = {name: list(expected[int(name)]) for name in texts}
    compared = 0
    while any(left.values()):
        going = [name for name in texts if left[name] and rng.random() >= away]
        rng.shuffle(going)
        for name in going:
            texts[name] += left[name][0][0]
        hidden = {name: len(left[name][0][0]) if overlap else 0 for name in going}
        trees = drafting.trees(*engine.batch(going, texts, prompts, hidden))
        for name, tree in zip(going, trees, strict=True):
            same = left[name].pop(0)[1]
            assert (tree.tokens, tree.parents) == (same.tokens, same.parents)
            assert tree.log_probs == pytest.approx(same.log_probs, abs=1e-3)
            compared += tree.drafted
    assert compared > 100
    drafting.forget()
    assert sorted(drafting.free_slots) == [0, 1, 2]


def test_requests_without_a_slot_get_their_root_alone(draft, ours):
    expected, cached = ours
    engine = Engine(False, 0, cached)
    drafting = Drafting(engine, str(draft), NODES, 1)
    prompts = {str(i): text for i, text in enumerate(TEXTS)}
    texts = {name: [*text, *expected[int(name)][0][0]] for name, text in prompts.items()}
    requests, taken, late = engine.batch(list(texts), texts, prompts, dict.fromkeys(texts, 0))
    trees = drafting.trees(requests, taken, late)
    assert [tree.drafted > 0 for tree in trees] == [True, False, False]
    assert [tree.tokens[0] for tree in trees] == [text[-1] for text in texts.values()]
    # A request of the same name that goes on otherwise is a new one: shorter texts are never ours.
    requests[0].output_ids = requests[0].output_ids[:1]
    again = drafting.trees(requests[:1], taken[:1], late[:1])[0]
    assert again.tokens[0] == requests[0].output_ids[-1] and again.drafted


def test_rows_are_read_as_they_lie():
    paged = torch.randn(5, 2, PAGE, 8)  # (pages, heads, page, size)
    flat = paged.transpose(1, 2).reshape(5 * PAGE, 2, 8)
    places = torch.tensor([19, 0, 7, 8], dtype=torch.int32)
    assert torch.equal(rows(paged, places), rows(flat, places))
    assert torch.equal(rows(flat, places)[:, 2], paged[1, :, 3])
    for other in (torch.zeros(4, 2, 8, dtype=torch.uint8), torch.zeros(2, 2, 2, 2, 2)):
        with pytest.raises(CapabilityError):
            rows(other, places)


def test_drafts_and_models_that_do_not_fit_are_refused(draft, tmp_path):
    with pytest.raises(CheckpointError):
        Drafting(Engine(False, 0), str(tmp_path), NODES, 1)
    engine = Engine(False, 0)
    engine.is_hybrid_swa = True
    with pytest.raises(CapabilityError):
        Drafting(engine, str(draft), NODES, 1)
    other = Engine(False, 0)
    other.model = tiny_model(hidden=96)
    other.model_config.hf_text_config = other.model.config
    with pytest.raises(CheckpointError):
        Drafting(other, str(draft), NODES, 1)


def test_sglang_reads_no_draft_of_ours_as_a_model_of_transformers(draft, tmp_path):
    """It reads the configuration of each draft's folder with transformers, which cannot read ours."""
    asked = []

    def read(model, **settings):
        asked.append((model, settings))
        return "theirs"

    assert config(read, str(draft), trust_remote_code=False, revision="main").architectures is None and not asked
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    for other in (str(tmp_path), str(tmp_path / "broken"), str(tmp_path / "config.json"), "name/on-a-hub"):
        assert config(read, other, trust_remote_code=False) == "theirs"
        assert asked.pop() == (other, {"trust_remote_code": False})
