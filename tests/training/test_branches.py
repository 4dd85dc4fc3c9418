"""Many answers to one passage: the model's own logits and features, whoever comes and goes; how tokens are chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import native
from longdraft.errors import MemoryBudgetError, NumericalError
from longdraft.model.runner import TargetRunner
from longdraft.training.branches import Branches, hidden_name, sample, top_of
from longdraft.training.documents import Document
from longdraft.training.features import FeatureReader
from tests.chi_square import p_value
from tests.nominal import card, moved
from tests.tiny import FAMILIES, tiny_model

LAYERS = (0, 2)


@pytest.fixture(params=["kernels", "torch"])
def attention(request, monkeypatch):
    """With our kernels and without."""
    if request.param == "kernels" and native.missing():
        pytest.skip(f"no kernels here: {native.missing()}")
    monkeypatch.setenv("LONGDRAFT_NATIVE", "1" if request.param == "kernels" else "0")


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Two passages; which rows step, in which order: some wait, one ends early and another begins in its row.
PASSAGES = [tokens(33, 1), tokens(7, 2)]
STEPS = [*[[0, 1, 3]] * 5, *[[1, 3]] * 2, *[[0, 1, 2, 3, 5]] * 9]
BEGINS = {(7, 0)}


def stepped(found: Branches) -> tuple[list, dict[int, list[int]]]:
    """Feeds tokens as ``STEPS`` says: (row, its tokens so far, its logits) of each, and what rows have in the end."""
    said, fed = [], {row: [] for row in range(6)}
    for number, rows in enumerate(STEPS):
        for row in rows:
            if (number, row) in BEGINS:
                fed[row] = []
                found.clear(row)
            fed[row].append(tokens(1, 100 * number + row)[0])
        logits = found.step(rows, [row // 3 for row in rows], [fed[row][-1] for row in rows])
        said += [(row, list(fed[row]), logits[i]) for i, row in enumerate(rows)]
    return said, fed


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own(attention, family):
    model = tiny_model(family)
    found = Branches(TargetRunner(model), 6, 20)
    for place, passage in enumerate(PASSAGES):
        assert found.read(place, passage) is None
    for row, fed, logits in stepped(found)[0]:
        with torch.no_grad():
            wanted = model(torch.tensor([PASSAGES[row // 3] + fed])).logits[0, -1]
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_what_is_kept_is_what_a_reader_reads(attention, dtype, error):
    runner = TargetRunner(tiny_model(dtype=dtype))
    found = Branches(runner, 6, 20, LAYERS)
    passages = [found.read(place, passage) for place, passage in enumerate(PASSAGES)]
    fed = stepped(found)[1]
    for row in (0, 1, 2, 3, 5):
        own, passage = found.features(row, fed[row]), passages[row // 3]
        text = Document(PASSAGES[row // 3] + fed[row])
        assert torch.cat([passage.tokens, own.tokens]).tolist() == text.tokens
        rows = {name: torch.cat([passage.rows[name], own.rows[name]]) for name in own.rows}
        by_kv = FeatureReader(runner, dtype).read(text)
        by_hidden = FeatureReader(runner, dtype, LAYERS).read(text)
        wanted = by_kv.rows | {
            hidden_name(layer): part for layer, part in zip(LAYERS, by_hidden.hidden.chunk(2, -1), strict=True)
        }
        assert rows.keys() == wanted.keys() and all(t.dtype == dtype for t in rows.values())
        for name in rows:
            far = (rows[name].float() - wanted[name].float()).norm() / wanted[name].float().norm()
            assert far < error, name
        likeliest = torch.cat([passage.likeliest, own.likeliest])[:-1]
        assert (likeliest == by_kv.likeliest).float().mean() > (0.8 if dtype == torch.bfloat16 else 0.999)


def test_the_host_waits_in_no_layer(monkeypatch):
    """A step copies its rows to the device and reads whether its logits are numbers."""
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    with card(monkeypatch) as found:
        made = Branches(TargetRunner(moved(tiny_model())), 6, 20, LAYERS)
        for place, passage in enumerate(PASSAGES):
            made.read(place, passage)
        found.waits.clear()
        made.step([0, 1, 3], [0, 0, 1], [5, 6, 7])
        assert sorted({wait.split()[1] for wait in found.waits}) == ["step"]
        assert len(found.waits) == 3


def test_rows_serve_any_passage():
    """One passage after the other in the same rows, which need be in no order."""
    model = tiny_model()
    found = Branches(TargetRunner(model), 2, 4)
    for number, passage in enumerate((tokens(20, 3), tokens(9, 4))):
        found.read(number, passage)
        for row in (0, 1):
            found.clear(row)
        for fed in ([5], [5, 6], [5, 6, 7], [5, 6, 7, 8]):
            logits = found.step([1, 0], [number] * 2, [fed[-1]] * 2)
        found.forget(number)
        with torch.no_grad():
            wanted = model(torch.tensor([[*passage, *fed]])).logits[0, -1]
        torch.testing.assert_close(logits, wanted.expand(2, -1), rtol=1e-3, atol=1e-4)


def test_logits_that_the_model_scales():
    """Its own head says them."""
    from transformers import AutoModelForCausalLM, GraniteConfig

    config = GraniteConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, logits_scaling=7.0, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    found = Branches(TargetRunner(model), 1, 4, ())
    passage = found.read(0, PASSAGES[0])
    logits = found.step([0], [0], [9])
    with torch.no_grad():
        wanted = model(torch.tensor([[*PASSAGES[0], 9]])).logits[0]
    torch.testing.assert_close(logits[0], wanted[-1], rtol=1e-3, atol=1e-5)
    assert torch.equal(passage.likeliest, wanted[:-1].argmax(-1))


def test_no_room_and_no_numbers(free_memory):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    found = Branches(TargetRunner(model), 1, 4)
    found.read(0, [1, 2, 3])
    with pytest.raises(NumericalError):
        found.step([0], [0], [1])
    free_memory(1000)
    with pytest.raises(MemoryBudgetError):
        Branches(TargetRunner(model), 2, 4)


# --- choosing tokens ---


@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([61, 512, 2560, 4096]),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_the_largest_of_long_rows(rows, size, count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=g)
    x[0, 256 : 256 + count] += 9  # all of them in one piece
    found, wanted = top_of(x, count), x.topk(count)
    assert torch.equal(found.values, wanted.values) and torch.equal(found.indices, wanted.indices)


def test_tokens_are_sampled_from_the_distribution():
    g = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, 40, generator=g)
    draws = 20_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=g)
    for temperature in (1.0, 0.5):
        found = sample(logits.expand(draws, -1), torch.full((draws,), temperature), uniform)
        assert p_value(found.bincount(minlength=40), torch.softmax(logits[0] / temperature, -1)) > 1e-3


def test_greedy_and_sampled_rows_side_by_side():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0], [float("-inf"), 0.0, float("-inf")]])
    uniform = torch.tensor([0.999, 0.001, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, torch.tensor([0.0, 1.0, 1.0]), uniform).tolist() == [1, 0, 1]
