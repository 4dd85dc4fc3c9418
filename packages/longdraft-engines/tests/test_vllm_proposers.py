"""vLLM's proposers without vLLM: fed as its runner feeds them, they draft what our own engine drafts."""

from __future__ import annotations

import itertools
import random
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import Speculator
from longdraft.errors import CapabilityError, CheckpointError, RequestError
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft_engines.vllm import LongSpec, Lookup, SpecExtend
from longdraft_engines.vllm.layer import AttentionLayer, StepQueries, read_interleaved_pages, read_vec_pages
from longdraft_engines.vllm.sampling import expand_batch_to_tokens
from tests.support.drafts import random_draft
from tests.support.tiny import tiny_model, tiny_tokenizer

ENGINES = "packages/longdraft-engines/pyproject.toml"
LONGEST, BLOCK, DRAFTED, ROUNDS = 160, 32, 3, 6
MODEL = tiny_model(context=LONGEST)
RUNNER = TargetRunner(MODEL)
LAYERS, HEADS, SIZE = MODEL.config.num_hidden_layers, MODEL.config.num_attention_heads, MODEL.config.head_dim
TEXTS = [[1 + (i * k) % 50 for i in range(n)] * 2 for k, n in ((3, 9), (7, 30), (1, 5))]


def config(options=None, **over):
    text = MODEL.config
    model = SimpleNamespace(
        max_model_len=LONGEST, hf_text_config=text, model="tiny", get_head_size=lambda: SIZE, dtype=torch.float32,
        get_total_num_kv_heads=lambda: text.num_key_value_heads,
    )  # fmt: skip
    layers = {f"model.layers.{i}.self_attn.attn": attention() for i in range(LAYERS)}
    return SimpleNamespace(**{
        "model_config": model,
        "speculative_config": SimpleNamespace(num_speculative_tokens=DRAFTED),
        "scheduler_config": SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=500),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "additional_config": {"longdraft": options or {}},
    } | over)  # fmt: skip


def attention():
    implementation = SimpleNamespace(forward=lambda module, query, key: query + key)
    return SimpleNamespace(kv_cache=torch.empty(0), num_heads=HEADS, head_size=SIZE, impl=implementation)


class Engine:
    """vLLM's model runner as a proposer sees it: shuffled batches, random pages, the CPU's packing, queries."""

    def __init__(self, proposer, seed, index=LAYERS - 1):
        self.proposer, self.rng = proposer, random.Random(seed)
        proposer.load_model(MODEL)
        proposer.runner = self
        self.index, self.name = index, f"model.layers.{index}.self_attn.attn"
        self.layer = proposer.config.compilation_config.static_forward_context[self.name]
        self.layer.kv_cache = torch.full((40, MODEL.config.num_key_value_heads, BLOCK, 2 * SIZE), torch.nan)
        self.free = list(range(40))
        self.blocks, self.computed = {}, {}
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[self.name])])

    def step(self, texts, emitted):
        """{request: proposed tokens}. ``texts``: all token ids of each request; ``emitted``: the new ones."""
        names = list(texts)
        self.rng.shuffle(names)
        ids, lengths = np.zeros((4, LONGEST), np.int32), np.zeros(4, np.int32)
        table = np.zeros((4, LONGEST // BLOCK), np.int32)
        for gone in set(self.blocks) - set(names):
            self.free += self.blocks.pop(gone)
            self.computed.pop(gone, None)
        before, queries, ends = np.zeros(4, np.int32), [], [0]
        for row, name in enumerate(names):
            text = texts[name]
            ids[row, : len(text)], lengths[row] = text, len(text)
            mine = self.blocks.setdefault(name, [])
            while len(mine) * BLOCK < len(text):
                mine.append(self.free.pop(self.rng.randrange(len(self.free))))
            table[row, : len(mine)] = mine
            before[row] = self.computed.get(name, self.rng.randrange(len(text) - len(emitted[name]) or 1))
            drafts = self.rng.randrange(3)  # rejected draft tokens
            queries += [self.write(text[:-1], mine)[before[row] :], torch.full((drafts, HEADS, SIZE), torch.nan)]
            ends.append(ends[-1] + sum(map(len, queries[-2:])))
            self.computed[name] = len(text) - 1
        if names:
            self.layer.impl.forward(self.layer, torch.cat(queries), key=0)
        self.input_batch = SimpleNamespace(
            req_ids=names, block_table=[SimpleNamespace(block_table=SimpleNamespace(np=table))],
            num_computed_tokens_cpu=before,
        )  # fmt: skip
        self.query_start_loc = SimpleNamespace(np=np.array(ends))
        found = self.proposer.propose([list(emitted[name]) for name in names], lengths, ids, slot_mappings=None)
        return dict(zip(names, found, strict=True))

    def write(self, text, blocks):
        """Fills pages; queries (tokens, heads, size)."""
        store = RUNNER.new_store(1, LONGEST)
        block = store.make_forward_batch([0], [text], is_prefill=True)
        computed = RUNNER.forward(block, store, logits="none", taps=Taps(queries=(self.index,)))
        store.commit(0, range(len(text)))
        cached = [x[0] for x in store.layer(self.index)]
        for i, block in enumerate(blocks):
            keys, values = (x[:, i * BLOCK : min((i + 1) * BLOCK, len(text))] for x in cached)
            page = self.layer.kv_cache[block].view(keys.shape[0], 2, -1)
            page[:, 0].view(keys.shape[0], -1, BLOCK)[:, :, : keys.shape[1]] = keys.transpose(1, 2)
            page[:, 1].view(keys.shape[0], BLOCK, -1)[:, : keys.shape[1]] = values
        return computed.queries[self.index][0].transpose(0, 1)


def rounds(method, text, **options):
    """The rounds of our engine on a text: the emitted tokens, and the next round's draft."""
    spec = Speculator(method, MODEL, tiny_tokenizer(), plan="fixed", **options)
    steps = [s for s in spec.stream([text], max_new_tokens=40) if s.token_ids]
    return [(s.token_ids, list(later.tree.tokens[1:])) for s, later in itertools.pairwise(steps)][:ROUNDS]


def follow(proposer, expected, seed, away=0.0, index=LAYERS - 1):
    """Feeds the emitted tokens and compares the drafts; requests join, leave, and are away for a while."""
    engine, rng = Engine(proposer, seed, index), random.Random(seed)
    texts = {str(i): list(text) for i, text in enumerate(TEXTS)}
    left = {name: list(expected[int(name)]) for name in texts}
    compared = 0
    while any(left.values()):
        going = [name for name in texts if left[name] and rng.random() >= away]
        emitted = {name: left[name][0][0] for name in going}
        for name in going:
            texts[name] += emitted[name]
        found = engine.step({name: texts[name] for name in going}, emitted)
        for name in going:
            drafted = left[name].pop(0)[1]
            compared += len(drafted)
            assert found[name][: len(drafted)] == drafted
    assert compared
    engine.step({}, {})
    assert sorted(proposer.free_slots) == list(range(proposer.slots))


def test_lookups_are_those_of_our_engine():
    options = {"max_draft": DRAFTED, "max_nodes": DRAFTED, "branches": 1}
    follow(Lookup(config()), [rounds("prompt-lookup", text, **options) for text in TEXTS], 0)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return random_draft(tmp_path_factory.mktemp("draft"), MODEL, window=12)


@pytest.fixture(scope="module")
def expected(draft):
    return [rounds("longspec", text, draft=draft, tree="chain", depth=DRAFTED) for text in TEXTS]


@given(seed=st.integers(0, 99), away=st.sampled_from([0.0, 0.4]))
@settings(max_examples=6, deadline=None)
def test_longspec_drafts_from_pages_what_our_engine_drafts(draft, expected, seed, away):
    follow(LongSpec(config({"draft": str(draft)})), expected, seed, away)


CHUNKS = {"chunk": 2, "chunks": 4, "sink": 2, "recent": 4}


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    """Options, and what our engine drafts with them. Another layer would choose other chunks."""
    MODEL.save_pretrained(folder := tmp_path_factory.mktemp("small"))
    options = {"draft": str(folder), **CHUNKS}
    found, other = (
        [rounds("specextend", text, tree="chain", depth=DRAFTED, **options, layer=layer) for text in TEXTS]
        for layer in (1, 0)
    )
    assert found != other
    return options | {"layer": 1}, found


@given(seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_specextend_drafts_from_chunks_what_our_engine_drafts(chunked, seed):
    options, found = chunked
    follow(SpecExtend(config(options)), found, seed, index=options["layer"])


def test_queries_are_those_of_the_rows_that_a_step_computed():
    settings = config()
    layer = AttentionLayer(settings, 1)
    queries = StepQueries(layer, torch.device("cpu"))
    given = torch.randn(9, HEADS, SIZE)
    assert torch.equal(layer.attention.impl.forward(layer.attention, given, key=1), given + 1)
    batch = SimpleNamespace(num_computed_tokens_cpu=np.array([10, 0]))
    runner = SimpleNamespace(input_batch=batch, query_start_loc=SimpleNamespace(np=np.array([0, 4, 9])))
    expected = given.transpose(0, 1)
    assert torch.equal(queries.read(runner, 0, 13, 2), expected[:, 1:3])
    assert torch.equal(queries.read(runner, 0, 14, 9), expected[:, :4])
    assert torch.equal(queries.read(runner, 1, 1, 1), expected[:, 4:5])
    assert queries.read(runner, 0, 10, 1) is None and queries.read(runner, 0, 15, 1) is None


def test_requests_without_a_slot_are_decoded_without_drafts(draft, expected):
    engine = Engine(LongSpec(config({"draft": str(draft), "slots": 1})), 0)
    texts = {str(i): [*text, *expected[i][0][0]] for i, text in enumerate(TEXTS)}
    found = engine.step(texts, {name: expected[int(name)][0][0] for name in texts})
    assert sum(map(bool, found.values())) == 1
    assert engine.step(texts, dict.fromkeys(texts, ())) == {key: [] for key in texts}  # prompts in prefill


@pytest.mark.parametrize("read", [read_interleaved_pages, read_vec_pages])
def test_pages_are_read_as_they_lie(read):
    k, v = torch.randn(2, 5, 2, BLOCK, 8).unbind()  # (pages, heads, block, size)
    joined = torch.cat([k, v], -1)
    if read is read_vec_pages:
        joined = torch.stack([k.transpose(2, 3).flatten(2), v.flatten(2)], 2).view(5, 2, BLOCK, 16)
    blocks, places = torch.tensor([4, 4, 0]), torch.tensor([30, 31, 0])
    keys, values = read(joined, blocks, places)
    assert torch.equal(keys, k[blocks, :, places]) and torch.equal(values, v[blocks, :, places])


def test_numbers_of_requests_are_spread_over_their_drafts():
    given, ends = torch.tensor([0.5, -1.0, 0.25]), torch.tensor([1, 3, 3], dtype=torch.int32)
    assert expand_batch_to_tokens(given, ends, 3, replace_from=-1, replace_to=1).tolist() == [0.5, 1.0, 1.0]
    assert expand_batch_to_tokens(given.int(), ends, 3).dtype == torch.int32


def test_options_that_cannot_be_used_are_refused(draft, tmp_path):
    sharded = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
    with pytest.raises(RequestError, match="nodes"):
        Lookup(config({"nodes": 3}))
    for wrong, error in (
        (config(), RequestError),
        (config({"draft": str(tmp_path)}), CheckpointError),
        (config({"draft": str(draft)}, parallel_config=sharded), CapabilityError),
    ):
        with pytest.raises(error):
            LongSpec(wrong).load_model(MODEL)


def test_a_proposer_without_the_plugin_says_so():
    with pytest.raises(CapabilityError, match="VLLM_PLUGINS"):
        Lookup(config()).propose([[1]], np.array([1]), np.array([[1]]))


def test_pages_in_another_packing_are_refused(draft):
    engine = Engine(LongSpec(config({"draft": str(draft)})), 0)
    engine.layer.isa = "amx"
    with pytest.raises(CapabilityError):
        engine.step({"0": [1, 2, 3]}, {"0": (3,)})


def test_the_entry_point_leads_to_what_registers_and_the_core_has_none():
    root = Path(__file__).parents[3]
    (found,) = re.findall(r'^longdraft = "(longdraft_engines\S+)"$', (root / ENGINES).read_text(), re.MULTILINE)
    assert callable(EntryPoint("longdraft", found, "").load())
    assert "entry-points" not in (root / "pyproject.toml").read_text()
