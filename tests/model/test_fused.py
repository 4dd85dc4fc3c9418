"""Fused layers: taken where they give what the model's own code gives, and only there."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator, load
from longdraft.drafts.fused_lm import FusedLM
from longdraft.memory import memory_info
from longdraft.memory.windows import WindowKVCache
from longdraft.model.runner import TargetRunner
from tests.native.levels import needs_kernels
from tests.support.forwards import forward
from tests.support.gguf_files import write_gguf
from tests.support.recurrent_models import recurrent_model
from tests.zoo.tiny_models import tiny_model

pytestmark = needs_kernels


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q8_0"), ("gemma3", "Q4_1"), ("llama", "Q6_K")])
def test_a_prompt_with_stored_weights_is_read_as_by_the_models_own_code(family, kind, tmp_path):
    """Both compute products in the same arithmetic, but only fused layers leave an MLP's rows in it between two."""
    write_gguf(tmp_path / "a.gguf", family, kind, hidden=256, vocab=64)
    tokens, found = [(7 * i + i // 5) % 61 for i in range(70)], []
    for own_code in (False, True):
        model = load(tmp_path / "a.gguf", device="cpu", arithmetic="int8").model
        for layer in model.model.layers if own_code else ():
            layer.register_forward_hook(lambda *_: None)
        runner = TargetRunner(model)
        assert bool(runner.execution_model.fused.layers) is not own_code
        found.append(forward(runner, [tokens], runner.new_store(1, 80), [0], is_prefill=True).logits)
    exact = load(tmp_path / "a.gguf", device="cpu", arithmetic="float32").model(torch.tensor([tokens])).logits
    # A last bit of a float may move what is rounded to 8 bits, on processors without AMX: far less than 8 bits cost.
    fused, own = ((each - exact).abs().mean() for each in found)
    assert (found[0] - found[1]).abs().mean() < 0.3 * own and 0.8 * own < fused < 1.2 * own


def test_a_layer_with_hooks_inside_runs_by_its_own_code():
    model = recurrent_model("qwen3_5_text")
    model.model.layers[0].linear_attn.out_proj.register_forward_hook(lambda *_: None)
    assert not TargetRunner(model).execution_model.fused.layers


def test_bits_do_not_depend_on_when_the_kv_of_windows_was_moved():
    """One store moves them for a wide tree that is dropped again, the other later or never."""
    runner, length = TargetRunner(tiny_model("mistral", max_position_embeddings=4096)), 2300
    store = runner.new_store(2, 2700)
    text = [(7 * i + i // 50) % 61 for i in range(length)]
    for slot in (0, 1):
        for first in range(0, length, 1000):
            chunk = text[first : first + 1000]
            forward(runner, [chunk], store, [slot], logits="none", is_prefill=True)
            store.commit(slot, range(len(chunk)))
    forward(runner, [[1] * 300], store, [1], logits="none")
    (windows,) = store.states
    assert isinstance(windows, WindowKVCache) and windows.start_positions[0] == 0 < windows.start_positions[1]
    for token in range(4):
        one, other = forward(runner, [[token]] * 2, store, [0, 1]).logits
        assert torch.equal(one, other)
        for slot in (0, 1):
            store.commit(slot, [0])


@pytest.mark.parametrize(("kind", "copied"), [("Q4_0", False), ("Q8_0", True), ("F16", True)])
def test_a_model_that_drafts_for_itself_needs_memory_for_what_is_copied_alone(kind, copied, tmp_path, monkeypatch):
    """Weights in so few bits already are read as they are stored."""
    write_gguf(tmp_path / "a.gguf", kind=kind, words=kind)
    runner = TargetRunner(load(tmp_path / "a.gguf", device="cpu", arithmetic="float32").model)
    monkeypatch.setattr(memory_info, "available_bytes", lambda device: 0)
    assert (runner.execution_model.fused.draft_stack() is None) is copied


@pytest.mark.parametrize(("kind", "copied"), [("Q4_0", False), ("Q5_0", False), ("Q8_0", True)])
def test_a_model_in_eight_bits_drafts_on_a_copy_in_four_if_it_is_asked_to(kind, copied, tmp_path, monkeypatch):
    write_gguf(tmp_path / "a.gguf", kind=kind, words="Q8_0")
    model = load(tmp_path / "a.gguf", device="cpu", arithmetic="int8").model
    runner = TargetRunner(model)
    fused = runner.execution_model.fused
    assert fused.draft_stack() is fused.stack and (fused.draft_stack("q4_0") is not fused.stack) is copied
    assert (FusedLM.from_runner(runner, "q4_0").forward_ratio < 1) is copied
    prompt = [[3, 9, 4, 7, 2, 5] * 9]
    expected, found = (
        Speculator(name, target=model, plan="fixed", **options).generate(prompt, max_new_tokens=24, eos_token_ids=[])[0]
        for name, options in (("ar", {}), ("self", {"depth": 3, "draft_weights": "q4_0"}))
    )
    assert found.token_ids == expected.token_ids and 0 < found.accepted <= found.drafted
    assert not copied or found.accepted < found.drafted
    without = TargetRunner(load(tmp_path / "a.gguf", device="cpu", arithmetic="int8").model).execution_model.fused
    monkeypatch.setattr(memory_info, "available_bytes", lambda device: 0)
    assert without.draft_stack("q4_0") is without.stack
