"""What a real GPU must show, in order of what matters; `pytest -m gpu tests/gpu` takes three minutes there.

What depends on the card (equal texts, errors, waits) is in the file of `--junitxml`.
`LONGDRAFT_TEST_GPU=rehearse pytest tests/gpu` runs the same tests on a CPU, with the paths that are there.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from longdraft import Request, Speculator
from longdraft.attention import dispatch, reference
from longdraft.bench.ties import compare_outputs
from longdraft.engine.verifier import verify_trees
from longdraft.model.gpu import merged_linear
from longdraft.model.outputs import Taps
from longdraft.model.runner import TargetRunner
from longdraft.training.config import LongSpecConfig
from longdraft.training.longspec import train_longspec
from longdraft.trees.tree import TokenTree
from tests.attention.cases import case
from tests.support.methods import EXACT, SpeculatorsByMethod
from tests.support.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
PATHS = ("hybrid",) if GPU else ("cpu", "sdpa")
HALF = torch.bfloat16 if GPU else torch.float32
# Head size 64 and more layers than tiny models have: the kernels are those of real models.
SIZES: dict[str, Any] = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64}
PROMPTS = [[3, 9, 14, 7, 22, 5] * 40, [8, 1, 1, 6] * 15, [2, 7, 1, 8, 2, 8]]
TREE = TokenTree((5, 7, 8, 9, 3, 2), (-1, 0, 0, 1, 3, 2))
# Largest error of an attention whose outputs are of unit size.
CLOSE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def model_of(dtype: torch.dtype, family: Any = "llama", **over: Any) -> Any:
    return tiny_model(family, dtype=dtype, **(SIZES | over)).to(DEVICE)


def side_by_side_of(model: Any) -> Any:
    """With weights that get the same rows side by side, as longdraft loads models."""
    merged_linear.join(model)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_plain_decoding_equals_generate(dtype, family, record_property):
    """float32: token for token but for near ties; 16 bits: what differs differs at a near tie, and is counted."""
    model = model_of(dtype, family)
    spec = Speculator("ar", target=model)
    equal = 0
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=DEVICE)
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, pad_token_id=0
        )
        theirs = theirs[0, len(prompt) :].tolist()
        (ours,) = spec.generate([prompt], max_new_tokens=48)
        difference = compare_outputs(spec.runner(), prompt, ours.token_ids, theirs)
        equal += difference is None
        assert difference is None or difference.near_tie, difference
    record_property("found", {"equal": equal, "of": len(PROMPTS), "path": spec.runner().attention_path})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32], ids=str)
def test_attention_is_the_definition(path, dtype, monkeypatch, record_property):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, path)
    errors = {}
    for lengths in ((0, 1000, 5001), (40000,)) if GPU else ((0, 70), (130,)):
        for rows in (1, 8, 64):
            q, keys, values, block, scale = case(lengths, rows, heads=(32, 8), head_dim=128, dtype=dtype, device=DEVICE)
            _, attend = dispatch.resolve(torch.device(DEVICE), dtype, 128)
            found = attend(q, keys, values, block, scale).float()
            expected = reference.attend(q.float(), keys.float(), values.float(), block, scale)
            errors[f"{len(lengths)}x{max(lengths)}, {rows}"] = float((found - expected).abs().max())
    record_property("errors", {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= CLOSE[dtype]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_recorded_forwards_equal_launched_ones(path, dtype, monkeypatch, record_property):
    """Logits, hidden states and queries of single rows, of a ragged batch of trees, and of a long chain."""
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, path)
    model, taps, found = model_of(dtype), Taps((1,), (0,)), []
    for switch in ("0", "1"):
        monkeypatch.setenv("LONGDRAFT_GRAPHS", switch)
        runner = TargetRunner(model)
        store = runner.new_store(3, 400)
        for slot, prompt in enumerate(PROMPTS):
            runner.forward(store.make_forward_batch([slot], [prompt], is_prefill=True), store, logits="none")
            store.commit(slot, range(len(prompt)))
        outs = []
        for slots, trees in (
            ([0], [TokenTree((5,), (-1,))]),
            ([2, 0], [TREE, TREE]),
            ([1], [TokenTree((7,) * 40, tuple(range(-1, 39)))]),
        ):
            for _ in range(4):
                out = verify_trees(runner, store, slots, trees, taps=taps)
            outs += [out.logits.clone(), out.hidden[1].clone(), out.queries[0].clone()]
        found.append(outs)
    assert runner.graphs.enabled == GPU
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)]
    record_property("found", {"largest": f"{max(errors):.1e}"})
    assert max(errors) <= CLOSE[dtype]


@pytest.mark.parametrize("fused", ["1", "0"])
def test_fused_layers_equal_the_models_own(fused, monkeypatch, record_property):
    monkeypatch.setenv("LONGDRAFT_FUSED", fused)
    if GPU:  # roundings of many layers add up
        deep = TargetRunner(side_by_side_of(model_of(HALF, layers=32, hidden=2048, heads=16, initializer_range=0.02)))
        assert len(deep.execution_model.fused.layers) == 32 * (fused == "1")
    for family in ("llama", "qwen3"):
        model = model_of(HALF, family, initializer_range=0.05)
        runner = TargetRunner(model)
        if GPU:
            assert bool(runner.execution_model.fused.layers) == (fused == "1")
        store = runner.new_store(1, 400)
        out = runner.forward(store.make_forward_batch([0], [PROMPTS[0]], is_prefill=True), store, logits="last").logits[
            0, -1
        ]
        with torch.inference_mode():
            expected = model(torch.tensor([PROMPTS[0]], device=DEVICE)).logits[0, -1].float()
        assert float((out - expected).abs().max()) <= 2 * CLOSE[HALF] * float(expected.abs().max())


@pytest.fixture(scope="module", params=[torch.float32, HALF] if GPU else [torch.float32], ids=str)
def on_device(request, tmp_path_factory) -> SpeculatorsByMethod:
    """Drafts that are right now and then, for a tiny target on the GPU."""
    specs = SpeculatorsByMethod(tmp_path_factory.mktemp("drafts"), request.param)
    specs.model = specs.model.to(DEVICE)
    return specs


@pytest.mark.parametrize("method", [m for m in EXACT if m != "ar"])
def test_methods_equal_plain_decoding_to_the_bit(method, on_device):
    """With ``deterministic=True``, near ties included; ragged, together, 64 tokens each."""
    wanted = {"target": on_device.model, "plan": "fixed", "deterministic": True}
    plain = [r.token_ids for r in Speculator("ar", **wanted).generate(PROMPTS, max_new_tokens=64)]
    spec = Speculator(method, **wanted, **on_device.options(method))
    steps = []
    run = spec.stream(PROMPTS, max_new_tokens=64)
    for step in run:
        steps.append(step)
    assert [r.token_ids for r in run.results()] == plain
    drafted, accepted = sum(s.drafted for s in steps), sum(s.accepted for s in steps)
    # These views hold short texts whole, so nothing that they say is wrong.
    assert 0 < accepted < drafted + (method in ("triforce", "magicdec"))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}], ids=str)
@pytest.mark.parametrize("method", ["longspec", "eagle3"])
def test_whole_rounds_in_one_graph_write_plain_decodings_text(method, settings, on_device):
    """Up to near ties; from the third round on a round is one graph. Samples of one seed differ after a near tie."""
    spec = Speculator(method, target=on_device.model, plan="fixed", **on_device.options(method))
    plain, counts = Speculator("ar", target=on_device.model), []
    for prompt in PROMPTS:
        ours, theirs = (s.generate([prompt], max_new_tokens=64, **settings)[0] for s in (spec, plain))
        counts.append((ours.accepted, ours.drafted))
        if settings:
            same = [a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=True)]
            assert all(same) if on_device.model.dtype == torch.float32 else same[0]
        else:
            difference = compare_outputs(spec.runner(), prompt, ours.token_ids, theirs.token_ids)
            assert difference is None or difference.near_tie, difference
    accepted, drafted = map(sum, zip(*counts, strict=True))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("method", ["prompt-lookup", "longspec", "eagle3"])
def test_requests_that_join_and_leave_equal_the_prompts_one_by_one(method, on_device):
    """To the bit with ``deterministic=True``, three slots for six requests of unlike lengths."""
    wanted = {"target": on_device.model, "plan": "fixed", "deterministic": True}
    prompts = [prompt[: len(prompt) - cut] for cut in (0, 3) for prompt in PROMPTS]
    lengths = [12 + 7 * i for i in range(len(prompts))]
    plain = Speculator("ar", **wanted)
    alone = [plain.generate([p], max_new_tokens=n)[0].token_ids for p, n in zip(prompts, lengths, strict=True)]
    session = Speculator(method, **wanted, **on_device.options(method)).session(batch=3)
    waiting = [Request(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    added, accepted = [session.add(waiting.pop(0)) for _ in range(2)], 0
    while session.busy or waiting:
        if waiting:
            added.append(session.add(waiting.pop(0)))
        accepted += sum(step.accepted for step in session.step())
    assert [session.result(i).token_ids for i in added] == alone and accepted


def test_kv_in_int8_is_that_of_a_slightly_different_model(record_property):
    """Logits of a tree behind a text are near those of 16 bits."""
    model, found = model_of(HALF), []
    for kv_dtype in (None, torch.int8) if GPU else (None, torch.float32):
        runner = TargetRunner(model, kv_dtype=kv_dtype)
        store = runner.new_store(2, 400)
        for slot, prompt in enumerate(PROMPTS[:2]):
            runner.forward(store.make_forward_batch([slot], [prompt], is_prefill=True), store, logits="none")
            store.commit(slot, range(len(prompt)))
        for _ in range(4):  # recorded at the third
            out = verify_trees(runner, store, [1, 0], [TREE, TREE]).logits.float()
        found.append(out)
    error = float((found[0] - found[1]).norm() / found[0].norm())
    record_property("found", {"apart": f"{error:.1e}"})
    assert error < 0.25  # a random model turns small errors into large ones: 0.09 on a CPU, of float32


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_methods_write_what_plain_decoding_on_quantized_kv_writes(kv_dtype):
    model, kv_dtype = model_of(HALF), kv_dtype if GPU else None
    spec = Speculator("prompt-lookup", target=model, plan="fixed", kv_dtype=kv_dtype)
    plain = Speculator("ar", target=model, kv_dtype=kv_dtype)
    for prompt in PROMPTS:
        ours, theirs = (s.generate([prompt], max_new_tokens=48)[0] for s in (spec, plain))
        difference = compare_outputs(spec.runner(), prompt, ours.token_ids, theirs.token_ids)
        assert difference is None or difference.near_tie, difference


@pytest.mark.parametrize("method", ["prompt-lookup", "longspec", "eagle3", "self"])
def test_methods_wait_for_the_device_as_often_as_they_say(method, on_device, record_property):
    """A round waits for the GPU two times at most, apart from the first ones."""
    spec = Speculator(method, target=on_device.model, plan="fixed", **on_device.options(method))
    run, found = spec.stream([PROMPTS[0]], max_new_tokens=64), []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if GPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for step in run:
                if step.mode != "prefill":
                    found.append(sum("synchroniz" in str(w.message) for w in seen))
                seen.clear()
        finally:
            if GPU:
                torch.cuda.set_sync_debug_mode("default")
    later = found[3:]
    record_property("found", {"mean": sum(later) / len(later), "largest": max(later)})
    assert sum(later) / len(later) <= 2.5


@pytest.mark.skipif(not GPU, reason="the host's memory is a CPU's own")
def test_offload_to_the_host_changes_nothing():
    """SpecPV on its partial cache, and plain decoding, with all layers but one kept on the host."""
    model, text = model_of(HALF, context=2048), [[i * 7 % 61 for i in range(900)]]
    given: dict[str, Any] = {"drafter": "prompt-lookup", "min_n": 1, "budget": 64, "sink": 16, "recent": 32}
    for method, options in (("ar", {}), ("specpv", given)):
        found = []
        for offload in (None, "host:1"):
            spec = Speculator(method, target=model, plan="fixed", offload=offload, **options)
            (result,) = spec.generate(text, max_new_tokens=96)
            found.append(result.token_ids)
        assert found[0] == found[1], method


def test_training_learns(tmp_path: Path, record_property):
    """Ten steps of a LongSpec draft: finite, falling losses, and a draft that drafts."""
    model = model_of(torch.float32)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(eos=True).save_pretrained(tmp_path / "target")
    rows = [json.dumps({"text": f"the {i}th of many lines, which are all alike. " * 12}) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    config = LongSpecConfig(
        data=(str(tmp_path / "data.jsonl"),), out=str(tmp_path / "out"), target=str(tmp_path / "target"), device=DEVICE,
        held_out=0.0, max_length=256, rows=1024, max_steps=10, epochs=100.0, window=64, measure_every=0, save_every=0,
        target_dtype="bfloat16" if GPU else "auto", precision="bf16" if GPU else "no",
    )  # fmt: skip
    losses = [one.loss for one in train_longspec(config)]
    record_property("found", {"first": losses[0], "last": losses[-1]})
    assert len(losses) == 10 and losses[-1] < losses[0]
    spec = Speculator("longspec", target=model, draft=tmp_path / "out" / "last", plan="fixed")
    plain = Speculator("ar", target=model).generate(PROMPTS[:1], max_new_tokens=24)
    (difference,) = (
        compare_outputs(spec.runner(), PROMPTS[0], r.token_ids, plain[0].token_ids)
        for r in spec.generate(PROMPTS[:1], max_new_tokens=24)
    )
    assert difference is None or difference.near_tie
