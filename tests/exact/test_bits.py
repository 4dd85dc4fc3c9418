"""To the bit: on a CPU, in float32 and in int8 arithmetic, the logits of a verified node are those of plain decoding.

So greedy tokens of every exact method are `ar`'s, near ties included. Products and attention are checked one by one in
tests/native; here a whole target is: any tree, any batch, any number of threads, all instruction sets that
this machine executes, whole layers in one call and layers of other kinds.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longdraft import load, native
from longdraft.model.runner import TargetRunner
from longdraft.native import library
from tests.native.cases import random_tree
from tests.native.levels import LEVELS, kernels_of
from tests.support.forwards import forward
from tests.support.gguf_files import write_gguf
from tests.support.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no kernels here: {native.unavailable_reason()}")

VOCABULARY = 61


@cache
def runner_of(level: str, family: str) -> TargetRunner:
    """A tiny target, made while these kernels are in use; its MLP is of a width that fills no vector."""
    if family == "int8":
        with TemporaryDirectory() as folder:
            write_gguf(Path(folder) / "a.gguf", kind="Q4_1", words="Q8_0", context=2048, intermediate_size=96)
            runner = TargetRunner(load(Path(folder) / "a.gguf", device="cpu").model)
        assert runner.arithmetic == "int8" and runner.kv_dtype == torch.bfloat16
        return runner
    return TargetRunner(tiny_model(family, context=2048, intermediate_size=101))


@pytest.fixture(params=LEVELS, scope="module")
def level(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load_result", [(kernels_of(request.param), None)])
        yield request.param


def prefill(runner: TargetRunner, store, slot: int, tokens: list[int]) -> None:
    """Prefills a prompt on one thread: torch's products for many tokens depend on the number of threads."""
    torch.set_num_threads(1)
    forward(runner, [tokens], store, [slot], logits="none", is_prefill=True)
    store.commit(slot, range(len(tokens)))


def plain_logits(runner: TargetRunner, text: list[int], path: list[int]) -> torch.Tensor:
    """(vocabulary,) logits after a prompt and then a path, which is decoded token by token."""
    store, threads = runner.new_store(1, len(text) + len(path)), torch.get_num_threads()
    prefill(runner, store, 0, text)
    torch.set_num_threads(threads)
    for token in path:
        out = forward(runner, [[token]], store, [0])
        store.commit(0, [0])
    return out.logits[0, 0]


# On the best instructions of this machine every family, on the others one of each arithmetic.
@pytest.mark.parametrize(
    ("level", "family"),
    [(name, kind) for name in LEVELS for kind in (*FAMILIES, "int8") if name == LEVELS[0] or kind in ("llama", "int8")],
    indirect=["level"],
)
@settings(max_examples=4)
@given(
    lengths=st.lists(
        st.one_of(st.integers(1, 30), st.integers(120, 132), st.integers(505, 515)), min_size=1, max_size=3
    ),
    size=st.one_of(st.integers(1, 12), st.integers(40, 70)),
    deep=st.sampled_from([0.2, 0.7, 0.9]),
    levels=st.integers(1, 3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@example(lengths=[500, 3, 129], size=60, deep=0.9, levels=1, threads=2, seed=0)  # more rows than MOST
@example(lengths=[126], size=6, deep=1.0, levels=2, threads=1, seed=1)
def test_a_verified_node(level, family, lengths, size, deep, levels, threads, seed):
    runner = runner_of(level, family)
    g = torch.Generator().manual_seed(seed)
    texts = [torch.randint(VOCABULARY, (n,), generator=g).tolist() for n in lengths]
    trees = [random_tree(size, seed + i, deep) for i in range(len(lengths))]
    tokens = [torch.randint(VOCABULARY, (size,), generator=g).tolist() for _ in lengths]
    store, slots = runner.new_store(len(lengths), max(lengths) + size + 2), list(range(len(lengths)))
    for slot, text in zip(slots, texts, strict=True):
        prefill(runner, store, slot, text)

    torch.set_num_threads(threads)
    mask = torch.stack([m for _, m in trees])
    depths = [(m.sum(1) - 1).tolist() for _, m in trees]
    found = []
    borders = [size * i // levels for i in range(levels + 1)]
    for a, b in pairwise(borders):  # the tree in one forward, or piece by piece
        if a < b:
            out = forward(
        runner,
                [row[a:b] for row in tokens], store, slots,
                depths=[d[a:b] for d in depths], mask=mask[:, a:b, :b], tree_offset=a,
            )  # fmt: skip
            found.append(out.logits)
    logits = torch.cat(found, dim=1)

    torch.set_num_threads(1 + threads % 2)
    for b in range(len(lengths)):
        for node in {0, size // 2, size - 1}:
            path = [tokens[b][i] for i in mask[b, node].nonzero()[:, 0].tolist()]
            assert torch.equal(logits[b, node], plain_logits(runner, texts[b], path))
    # What is committed of a tree is what plain decoding would have written, so decoding goes on as it would have.
    paths = [mask[b, size - 1].nonzero()[:, 0].tolist() for b in range(len(lengths))]
    for b, path in enumerate(paths):
        store.commit(b, path)
    after = forward(runner, [[4, 8]] * len(lengths), store, slots).logits[:, 1]
    for b, path in enumerate(paths):
        assert torch.equal(after[b], plain_logits(runner, texts[b], [*(tokens[b][i] for i in path), 4, 8]))


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("length", [7, 160])
def test_int8_logits_are_those_of_every_instruction_set(length, prompt):
    """But of tiles, which multiply queries and weights of attention in bfloat16; and a prompt's rows,
    beside which the others' own rounding to eight bits shows (tests/native bounds them)."""
    found = {}
    for level in LEVELS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "load_result", [(kernels_of(level), None)])
            runner, text = runner_of(level, "int8"), [t * 7 % VOCABULARY for t in range(length)]
            store = runner.new_store(1, length + 4)
            if prompt:
                prefill(runner, store, 0, text)
            else:
                forward(runner, [text], store, [0])
                store.commit(0, range(length))
            found[level] = forward(runner, [[3, 1, 4]], store, [0]).logits
    tiles, others = (
        [logits for level, logits in found.items() if level.endswith("amx") == own] for own in (True, False)
    )
    assert all(torch.equal(logits, others[0]) for logits in others)
    for logits in tiles:
        assert (logits - others[0]).abs().max() < (0.1 if prompt else 0.05) * others[0].abs().max()


@pytest.mark.parametrize("offload", [None, "host:1"])
def test_wherever_the_cache_is_kept(offload, level, cpu_offloads):
    runner = runner_of(level, "llama")
    assert runner.execution_model.fused.stack is not None  # all layers in one call
    other = TargetRunner(runner.model, offload=offload)
    text, tokens = list(range(50)), [3, 1, 4, 1, 5]
    store = other.new_store(1, 64)
    prefill(other, store, 0, text)
    logits = forward(other, [tokens], store, [0]).logits[0]
    assert torch.equal(logits[4], plain_logits(other, text, tokens))
