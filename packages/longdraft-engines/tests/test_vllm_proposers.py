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
# Longest request and page in tokens, drafted tokens of a round, and rounds that are compared.
MAX_LENGTH, BLOCK_SIZE, NUM_DRAFTED, NUM_ROUNDS = 160, 32, 3, 6
MODEL = tiny_model(context=MAX_LENGTH)
RUNNER = TargetRunner(MODEL)
NUM_LAYERS, NUM_HEADS, HEAD_DIM = (
    MODEL.config.num_hidden_layers,
    MODEL.config.num_attention_heads,
    MODEL.config.head_dim,
)
TEXTS = [[1 + (i * k) % 50 for i in range(n)] * 2 for k, n in ((3, 9), (7, 30), (1, 5))]


def make_config(options=None, **overrides):
    text_config = MODEL.config
    model = SimpleNamespace(
        max_model_len=MAX_LENGTH, hf_text_config=text_config, model="tiny", get_head_size=lambda: HEAD_DIM,
        dtype=torch.float32, get_total_num_kv_heads=lambda: text_config.num_key_value_heads,
    )  # fmt: skip
    layers = {f"model.layers.{i}.self_attn.attn": make_attention() for i in range(NUM_LAYERS)}
    return SimpleNamespace(**{
        "model_config": model,
        "speculative_config": SimpleNamespace(num_speculative_tokens=NUM_DRAFTED),
        "scheduler_config": SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=500),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "additional_config": {"longdraft": options or {}},
    } | overrides)  # fmt: skip


def make_attention():
    implementation = SimpleNamespace(forward=lambda module, query, key: query + key)
    return SimpleNamespace(kv_cache=torch.empty(0), num_heads=NUM_HEADS, head_size=HEAD_DIM, impl=implementation)


class Engine:
    """vLLM's model runner as a proposer sees it: shuffled batches, random pages, the CPU's packing, queries."""

    def __init__(self, proposer, seed, index=NUM_LAYERS - 1):
        self.proposer, self.rng = proposer, random.Random(seed)
        proposer.load_model(MODEL)
        proposer.runner = self
        self.index, self.name = index, f"model.layers.{index}.self_attn.attn"
        self.layer = proposer.config.compilation_config.static_forward_context[self.name]
        self.layer.kv_cache = torch.full((40, MODEL.config.num_key_value_heads, BLOCK_SIZE, 2 * HEAD_DIM), torch.nan)
        self.free = list(range(40))
        self.blocks, self.computed = {}, {}
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[self.name])])

    def step(self, texts, emitted):
        """Returns {request: proposed tokens}. ``texts``: all token ids of each request; ``emitted``: the new ones."""
        names = list(texts)
        self.rng.shuffle(names)
        ids, lengths = np.zeros((4, MAX_LENGTH), np.int32), np.zeros(4, np.int32)
        table = np.zeros((4, MAX_LENGTH // BLOCK_SIZE), np.int32)
        for ended in set(self.blocks) - set(names):
            self.free += self.blocks.pop(ended)
            self.computed.pop(ended, None)
        num_computed, queries, ends = np.zeros(4, np.int32), [], [0]
        for row, name in enumerate(names):
            text = texts[name]
            ids[row, : len(text)], lengths[row] = text, len(text)
            blocks = self.blocks.setdefault(name, [])
            while len(blocks) * BLOCK_SIZE < len(text):
                blocks.append(self.free.pop(self.rng.randrange(len(self.free))))
            table[row, : len(blocks)] = blocks
            num_computed[row] = self.computed.get(name, self.rng.randrange(len(text) - len(emitted[name]) or 1))
            num_rejected = self.rng.randrange(3)  # draft tokens of the step before
            queries += [
                self.write(text[:-1], blocks)[num_computed[row] :],
                torch.full((num_rejected, NUM_HEADS, HEAD_DIM), torch.nan),
            ]
            ends.append(ends[-1] + sum(map(len, queries[-2:])))
            self.computed[name] = len(text) - 1
        if names:
            self.layer.impl.forward(self.layer, torch.cat(queries), key=0)
        self.input_batch = SimpleNamespace(
            req_ids=names, block_table=[SimpleNamespace(block_table=SimpleNamespace(np=table))],
            num_computed_tokens_cpu=num_computed,
        )  # fmt: skip
        self.query_start_loc = SimpleNamespace(np=np.array(ends))
        drafts = self.proposer.propose([list(emitted[name]) for name in names], lengths, ids, slot_mappings=None)
        return dict(zip(names, drafts, strict=True))

    def write(self, text, blocks):
        """Fills pages with the KV of a text, and returns the text's queries (tokens, heads, head_dim)."""
        store = RUNNER.new_store(1, MAX_LENGTH)
        batch = store.make_forward_batch([0], [text], is_prefill=True)
        computed = RUNNER.forward(batch, store, logits="none", taps=Taps(queries=(self.index,)))
        store.commit(0, range(len(text)))
        cached = [x[0] for x in store.layer(self.index)]
        for i, block in enumerate(blocks):
            keys, values = (x[:, i * BLOCK_SIZE : min((i + 1) * BLOCK_SIZE, len(text))] for x in cached)
            page = self.layer.kv_cache[block].view(keys.shape[0], 2, -1)
            page[:, 0].view(keys.shape[0], -1, BLOCK_SIZE)[:, :, : keys.shape[1]] = keys.transpose(1, 2)
            page[:, 1].view(keys.shape[0], BLOCK_SIZE, -1)[:, : keys.shape[1]] = values
        return computed.queries[self.index][0].transpose(0, 1)


def rounds(method, text, **options):
    """Returns the rounds of our engine on a text: the emitted tokens, and the next round's draft."""
    spec = Speculator(method, MODEL, tiny_tokenizer(), plan="fixed", **options)
    steps = [s for s in spec.stream([text], max_new_tokens=40) if s.token_ids]
    return [(s.token_ids, list(later.tree.tokens[1:])) for s, later in itertools.pairwise(steps)][:NUM_ROUNDS]


def follow(proposer, expected, seed, absence_rate=0.0, index=NUM_LAYERS - 1):
    """Feeds the emitted tokens and compares the drafts; requests join, leave, and miss some steps."""
    engine, rng = Engine(proposer, seed, index), random.Random(seed)
    texts = {str(i): list(text) for i, text in enumerate(TEXTS)}
    rounds_left = {name: list(expected[int(name)]) for name in texts}
    num_compared = 0
    while any(rounds_left.values()):
        running = [name for name in texts if rounds_left[name] and rng.random() >= absence_rate]
        emitted = {name: rounds_left[name][0][0] for name in running}
        for name in running:
            texts[name] += emitted[name]
        drafts = engine.step({name: texts[name] for name in running}, emitted)
        for name in running:
            drafted = rounds_left[name].pop(0)[1]
            num_compared += len(drafted)
            assert drafts[name][: len(drafted)] == drafted
    assert num_compared
    engine.step({}, {})
    assert sorted(proposer.free_slots) == list(range(proposer.slots))


def test_lookups_are_those_of_our_engine():
    options = {"max_draft": NUM_DRAFTED, "max_nodes": NUM_DRAFTED, "branches": 1}
    follow(Lookup(make_config()), [rounds("prompt-lookup", text, **options) for text in TEXTS], 0)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return random_draft(tmp_path_factory.mktemp("draft"), MODEL, window=12)


@pytest.fixture(scope="module")
def expected(draft):
    return [rounds("longspec", text, draft=draft, tree="chain", depth=NUM_DRAFTED) for text in TEXTS]


@given(seed=st.integers(0, 99), absence_rate=st.sampled_from([0.0, 0.4]))
@settings(max_examples=6, deadline=None)
def test_longspec_drafts_from_pages_what_our_engine_drafts(draft, expected, seed, absence_rate):
    follow(LongSpec(make_config({"draft": str(draft)})), expected, seed, absence_rate)


CHUNKS = {"chunk": 2, "chunks": 4, "sink": 2, "recent": 4}


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    """Returns options, and what our engine drafts with these options. Another layer would choose other chunks."""
    MODEL.save_pretrained(folder := tmp_path_factory.mktemp("small"))
    options = {"draft": str(folder), **CHUNKS}
    by_layer_1, by_layer_0 = (
        [rounds("specextend", text, tree="chain", depth=NUM_DRAFTED, **options, layer=layer) for text in TEXTS]
        for layer in (1, 0)
    )
    assert by_layer_1 != by_layer_0
    return options | {"layer": 1}, by_layer_1


@given(seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_specextend_drafts_from_chunks_what_our_engine_drafts(chunked, seed):
    options, expected = chunked
    follow(SpecExtend(make_config(options)), expected, seed, index=options["layer"])


def test_queries_are_those_of_the_rows_that_a_step_computed():
    layer = AttentionLayer(make_config(), 1)
    queries = StepQueries(layer, torch.device("cpu"))
    step_queries = torch.randn(9, NUM_HEADS, HEAD_DIM)
    assert torch.equal(layer.attention.impl.forward(layer.attention, step_queries, key=1), step_queries + 1)
    batch = SimpleNamespace(num_computed_tokens_cpu=np.array([10, 0]))
    runner = SimpleNamespace(input_batch=batch, query_start_loc=SimpleNamespace(np=np.array([0, 4, 9])))
    expected = step_queries.transpose(0, 1)
    assert torch.equal(queries.read(runner, 0, 13, 2), expected[:, 1:3])
    assert torch.equal(queries.read(runner, 0, 14, 9), expected[:, :4])
    assert torch.equal(queries.read(runner, 1, 1, 1), expected[:, 4:5])
    assert queries.read(runner, 0, 10, 1) is None and queries.read(runner, 0, 15, 1) is None


def test_requests_without_a_slot_are_decoded_without_drafts(draft, expected):
    engine = Engine(LongSpec(make_config({"draft": str(draft), "slots": 1})), 0)
    texts = {str(i): [*text, *expected[i][0][0]] for i, text in enumerate(TEXTS)}
    drafts = engine.step(texts, {name: expected[int(name)][0][0] for name in texts})
    assert sum(map(bool, drafts.values())) == 1
    assert engine.step(texts, dict.fromkeys(texts, ())) == {key: [] for key in texts}  # prompts in prefill


@pytest.mark.parametrize("read", [read_interleaved_pages, read_vec_pages])
def test_pages_are_read_as_they_lie(read):
    k, v = torch.randn(2, 5, 2, BLOCK_SIZE, 8).unbind()  # (pages, heads, block, size)
    pages = torch.cat([k, v], -1)
    if read is read_vec_pages:
        pages = torch.stack([k.transpose(2, 3).flatten(2), v.flatten(2)], 2).view(5, 2, BLOCK_SIZE, 16)
    blocks, offsets = torch.tensor([4, 4, 0]), torch.tensor([30, 31, 0])
    keys, values = read(pages, blocks, offsets)
    assert torch.equal(keys, k[blocks, :, offsets]) and torch.equal(values, v[blocks, :, offsets])


def test_numbers_of_requests_are_spread_over_their_drafts():
    values, ends = torch.tensor([0.5, -1.0, 0.25]), torch.tensor([1, 3, 3], dtype=torch.int32)
    assert expand_batch_to_tokens(values, ends, 3, replace_from=-1, replace_to=1).tolist() == [0.5, 1.0, 1.0]
    assert expand_batch_to_tokens(values.int(), ends, 3).dtype == torch.int32


def test_options_that_cannot_be_used_are_refused(draft, tmp_path):
    sharded = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
    with pytest.raises(RequestError, match="nodes"):
        Lookup(make_config({"nodes": 3}))
    for wrong, error in (
        (make_config(), RequestError),
        (make_config({"draft": str(tmp_path)}), CheckpointError),
        (make_config({"draft": str(draft)}, parallel_config=sharded), CapabilityError),
    ):
        with pytest.raises(error):
            LongSpec(wrong).load_model(MODEL)


def test_a_proposer_without_the_plugin_says_so():
    with pytest.raises(CapabilityError, match="VLLM_PLUGINS"):
        Lookup(make_config()).propose([[1]], np.array([1]), np.array([[1]]))


def test_pages_in_another_packing_are_refused(draft):
    engine = Engine(LongSpec(make_config({"draft": str(draft)})), 0)
    engine.layer.isa = "amx"
    with pytest.raises(CapabilityError):
        engine.step({"0": [1, 2, 3]}, {"0": (3,)})


def test_the_entry_point_leads_to_what_registers_and_the_core_has_none():
    root = Path(__file__).parents[3]
    (entry_point,) = re.findall(r'^longdraft = "(longdraft_engines\S+)"$', (root / ENGINES).read_text(), re.MULTILINE)
    assert callable(EntryPoint("longdraft", entry_point, "").load())
    assert "entry-points" not in (root / "pyproject.toml").read_text()
