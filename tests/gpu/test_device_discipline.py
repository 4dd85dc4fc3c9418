"""Every method's rounds on a simulated GPU: no operation mixes devices, and the host waits no more than necessary.

docs/gpu.md explains the numbers.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from longdraft import Speculator
from longdraft.attention.transfer import to_device
from longdraft.drafters.shared.block_drafter import BlockDrafter
from longdraft.engine.prefill import default_chunk_size
from longdraft.errors import NumericalError
from longdraft.model.gpu.cuda_graphs import CudaGraphs
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit
from tests.support.methods import EXACT, METHODS, Case, SpeculatorsByMethod
from tests.support.simulated_gpu import (
    DEVICE,
    MixedDevicesError,
    SimulatedGPU,
    SimulatedGraphs,
    SimulatedTensor,
    to_simulated_gpu,
)
from tests.support.slow_marks import slow
from tests.support.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [8, 1, 1, 6] * 9]
# Methods whose whole rounds are recorded, if trees have a fixed shape.
WHOLE = ("longspec", "eagle3", "eagle")
# The most waits of the host in a round: for the accepted tokens; and for the tree, if the device grows it apart.
WAITS = dict.fromkeys(EXACT, 2) | dict.fromkeys(("ar", "prompt-lookup", "suffix", *WHOLE), 1)
WAITS |= dict.fromkeys(("specextend", "specextend-eagle3"), 4)  # and for the chunks that are chosen for each prompt
WAITS["triforce"] = 21  # each level is verified, and its confidence read
# The small trees that docs/gpu.md counts.
FLAT = {"depth": 2, "top_k": 4}
OWN_VIEW = {"view": "streaming", "budget": 12, "sink": 2, "window": 2}
COUNTED = {
    "prompt-lookup": {"min_n": 1}, "longspec": {"widths": (4, 2)}, "eagle3": FLAT, "eagle": FLAT, "mtp": FLAT,
    "small-lm": {"depth": 3, "nodes": 8}, "specextend": {"depth": 2, "nodes": 8},
    "specextend-eagle3": {"depth": 2, "nodes": 8}, "self": {"depth": 2, **OWN_VIEW},
    "magicdec": {"depth": 2}, "tokenswift": {"reuse_n": 2, **OWN_VIEW}, "triforce": {},
}  # fmt: skip


def options_of(specs: SpeculatorsByMethod, method: str) -> dict[str, Any]:
    draft = (METHODS[method].draft or "").removesuffix(" window") or None
    draft = "target" if method == "small-lm" else draft
    return specs.given(Case(method, draft, COUNTED.get(method, {})), specs.model)


NEW = 8
# One method of each kind; the others are slow tests.
QUICK = ("prompt-lookup", "longspec", "eagle3", "self")
# Methods whose draft forwards are recorded apart.
RECORDED = ("self", "magicdec", "tokenswift")


def leave_out_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockDrafter, "replay_round", lambda *_: None)


def rounds(spec: Speculator, found: SimulatedGPU, new: int = NEW, **settings: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens, and the number of waits of each round except the first."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    waits: list[int] = []
    for step in spec.stream(PROMPTS, max_new_tokens=new, eos_token_ids=[], **settings):
        outputs[step.sequence] += step.token_ids
        if step.seconds and step.mode != "prefill":
            waits.append(len(found.waits))
        if step.seconds:
            found.waits.clear()
    return outputs, waits[1:]


@pytest.fixture
def specs(tmp_path: Path) -> SpeculatorsByMethod:
    return SpeculatorsByMethod(tmp_path, torch.float32)


SAMPLED = {"temperature": 0.8, "seed": 5}
FILTERED = SAMPLED | {"top_k": 5, "top_p": 0.9, "min_p": 0.05}
CASES = [*((method, {}) for method in QUICK), ("longspec", SAMPLED), ("eagle3", FILTERED)]
CASES += [slow(method, {}) for method in EXACT if method not in QUICK]
CASES += [slow("ar", FILTERED), *(slow("self", settings) for settings in (SAMPLED, FILTERED))]


@pytest.mark.parametrize(("method", "settings"), CASES, ids=str)
def test_a_round_waits_for_the_device_as_seldom_as_it_can(method, settings, specs, simulated_gpu, monkeypatch):
    """The random numbers of coming samples are known, so the samples of all nodes are read at once."""
    options, new = options_of(specs, method), 14  # so many that chunks are chosen anew, and levels meet a second round
    plain = Speculator("ar", target=specs.model)
    expected = plain.generate(PROMPTS, max_new_tokens=new, eos_token_ids=[], **settings)
    to_simulated_gpu(specs.model)
    spec = Speculator(method, target=specs.model, plan="fixed", **options)
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *_: generator())
    outputs, waits = rounds(spec, simulated_gpu, new, **settings)
    assert outputs == [r.token_ids for r in expected]
    assert max(waits) == WAITS[method]
    # The first round is recorded too, but not counted.
    assert recorder.replays > (len(waits) + 1 if method in RECORDED else len(waits))
    assert method not in WHOLE or recorder.replays == len(waits) + 1


# Launches and copies of a round with recorded forwards, at most; docs/gpu.md has them.
ASKED = {"ar": (23, 6), "self": (101, 16)} | dict.fromkeys(WHOLE, (3, 2))
BY_LEVELS = {"longspec": (85, 15), "eagle3": (91, 13), "eagle": (91, 13)}  # as a planner's rounds
ASKED_CASES = [(method, numbers, False) for method, numbers in ASKED.items()]
ASKED_CASES += [slow(method, numbers, True) for method, numbers in BY_LEVELS.items()]


@pytest.mark.parametrize(("method", "most", "by_levels"), ASKED_CASES, ids=str)
def test_a_round_asks_the_device_for_no_more_than_it_must(method, most, by_levels, specs, simulated_gpu, monkeypatch):
    if by_levels:
        leave_out_whole_rounds(monkeypatch)
    options = options_of(specs, method)
    to_simulated_gpu(specs.model)
    spec = Speculator(method, target=specs.model, plan="fixed", **options)
    spec.runner().graphs = CudaGraphs(SimulatedGraphs(simulated_gpu), uses_before_capture=0)
    found: list[tuple[int, int]] = []
    for _ in range(2):  # in the second run everything is recorded
        found.clear()
        for step in spec.stream(PROMPTS, max_new_tokens=NEW, eos_token_ids=[]):
            if step.seconds and step.mode != "prefill":
                found.append((simulated_gpu.launches, simulated_gpu.copies))
            if step.seconds:
                simulated_gpu.launches = simulated_gpu.copies = 0
    launches, copies = (statistics.median(each) for each in zip(*found, strict=True))
    # Versions of torch differ in how many operations some of theirs are made of.
    assert launches <= 1.1 * most[0] and copies <= most[1]


DYNAMIC, OPT = {"depth": 5, "top_k": 3}, {"tree": "opt", "threshold": 0.01, "depth": 5}
WIDE = {"depth": 3, "top_k": 12, "nodes": 70}  # so wide that some of the vocabulary's 61 tokens are accepted


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("longspec", OPT),
        ("eagle3", WIDE),
        *(slow("longspec", tree) for tree in (DYNAMIC, WIDE)),
        slow("eagle", WIDE),
        *(slow("eagle3", tree) for tree in (DYNAMIC, DYNAMIC | {"window": 8}, OPT)),
        *(slow("eagle", tree) for tree in (DYNAMIC, OPT)),
    ],
    ids=str,
)  # fmt: skip
def test_a_recorded_round_drafts_what_the_round_drafts(method, tree, specs, simulated_gpu, monkeypatch):
    """Trees of several widths and depths, of sequences that end at different times: the same tokens are accepted."""
    options = options_of(specs, method) | {"widths": None, "tree": "dynamic", "nodes": 20} | tree
    to_simulated_gpu(specs.model)
    found = []
    unrecorded, whole, by_levels = None, SimulatedGraphs(simulated_gpu), SimulatedGraphs(simulated_gpu)
    for recorder in (unrecorded, whole, by_levels):
        if recorder is by_levels:
            leave_out_whole_rounds(monkeypatch)
        spec = Speculator(method, target=specs.model, plan="fixed", **options)
        spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
        steps = spec.stream(PROMPTS, max_new_tokens=12, eos_token_ids=[4])
        found.append([(step.sequence, step.drafted, step.accepted, step.token_ids) for step in steps])
    assert found[0] == found[1] == found[2] and by_levels.replays > len(found[0])
    assert tree is not WIDE or 0 < sum(accepted for *_, accepted, _ in found[0]) < sum(step[1] for step in found[0])
    assert tree is OPT or 0 < whole.replays < len(found[0])


def test_a_planned_round_is_whole_too_where_the_draft_runs(specs, simulated_gpu):
    """Of few sizes, which grow while the planner learns that more nodes pay."""
    method = "eagle3"
    options = {name: x for name, x in options_of(specs, method).items() if name not in COUNTED[method]}
    expected = Speculator("ar", target=specs.model).generate(PROMPTS, max_new_tokens=40, eos_token_ids=[])
    to_simulated_gpu(specs.model)
    spec = Speculator(method, target=specs.model, plan={1: 0.02, 64: 0.021}, **options)  # trees cost next to nothing
    recorder = SimulatedGraphs(simulated_gpu)
    spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
    outputs, waits = rounds(spec, simulated_gpu, 40)
    assert outputs == [r.token_ids for r in expected] and set(waits) == {1}
    again = list(spec.stream(PROMPTS, max_new_tokens=40, eos_token_ids=[]))
    sizes = {step.drafted for step in again if step.drafted and step.finish_reason is None}
    assert len(sizes) <= 2 and sizes <= {16, 32, 50, 59} and recorder.captures <= 8
    assert 0 < sum(step.accepted for step in again) < sum(step.drafted for step in again)
    costly = Speculator(method, target=specs.model, plan={1: 0.02, 2: 2.0}, **options)  # none pays
    costly.runner().graphs = CudaGraphs(SimulatedGraphs(simulated_gpu), uses_before_capture=0)
    drafted = [step.drafted for step in costly.stream(PROMPTS, max_new_tokens=12, eos_token_ids=[]) if step.token_ids]
    assert not any(drafted[2 + len(PROMPTS) :])  # the first round tried, before anything was learned


def test_a_whole_round_without_numbers_is_an_error(specs, simulated_gpu, monkeypatch):
    spec = Speculator("longspec", target=to_simulated_gpu(specs.model), plan="fixed", **options_of(specs, "longspec"))
    spec.runner().graphs = CudaGraphs(SimulatedGraphs(simulated_gpu), uses_before_capture=0)
    compute = TargetRunner.compute_captured
    monkeypatch.setattr(TargetRunner, "compute_captured", lambda *args: compute(*args).fill_(float("nan")))
    with pytest.raises(NumericalError, match="NaN"):
        spec.generate(PROMPTS, max_new_tokens=NEW)


@pytest.mark.parametrize("method", ["longspec", slow("eagle3")])
def test_planned_trees_of_changing_sizes_share_recordings(method, specs, simulated_gpu, monkeypatch):
    # A tree that the user has not defined, which a planner may shrink.
    options = {name: x for name, x in options_of(specs, method).items() if name not in COUNTED[method]}
    to_simulated_gpu(specs.model)
    leave_out_whole_rounds(monkeypatch)
    propose, captures = BlockDrafter.propose, []
    for sizes in ([32], [17, 29, 23, 31, 20, 26]):
        limits = itertools.cycle(NodeLimit(n, 0.01) for n in sizes)
        monkeypatch.setattr(BlockDrafter, "propose", lambda self, rows, _=None, n=limits: propose(self, rows, next(n)))
        spec = Speculator(method, target=specs.model, plan="fixed", **options)
        recorder = SimulatedGraphs(simulated_gpu)
        spec.runner().graphs = CudaGraphs(recorder, uses_before_capture=0)
        steps = list(spec.stream(PROMPTS[:1], max_new_tokens=30, eos_token_ids=[]))
        assert {step.drafted for step in steps} == {0, *sizes}
        captures.append(recorder.captures)
    assert captures[0] == captures[1] > 1


def test_a_gpu_reads_prompts_in_larger_pieces(simulated_gpu):
    model, prompt = tiny_model(context=8192, layers=1, heads=1, kv_heads=1), PROMPTS[0] * 90  # 4,320 tokens
    assert default_chunk_size(TargetRunner(model)) == 1024
    spec = Speculator("ar", target=to_simulated_gpu(model))
    steps = [step for step in spec.stream([prompt], max_new_tokens=1) if step.mode == "prefill"]
    assert [step.prefilled for step in steps] == [4096, len(prompt)]


@pytest.mark.parametrize("method", ["longspec", slow("eagle3")])
def test_an_opt_tree_never_leaves_the_device_idle(method, specs, simulated_gpu):
    """Which trees go on is read while the next level is computed."""
    options = options_of(specs, method) | {"widths": None, "tree": "opt", "threshold": 0.0, "depth": 5, "nodes": 9}
    expected = Speculator("ar", target=specs.model).generate(PROMPTS, max_new_tokens=NEW, eos_token_ids=[])
    to_simulated_gpu(specs.model)
    outputs, waits = rounds(Speculator(method, target=specs.model, plan="fixed", **options), simulated_gpu)
    assert outputs == [list(r.token_ids) for r in expected]
    assert max(waits) <= 2
    assert simulated_gpu.overlapped > 0


# --- the simulated GPU itself ---


@torch.inference_mode()
def test_what_a_gpu_would_refuse_is_refused(simulated_gpu):
    x = SimulatedTensor(torch.ones(3))
    assert (x.device.type, (x + 1).device.type) == ("cuda", "cuda")
    assert torch.equal((x * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))  # a number may be mixed in
    with pytest.raises(MixedDevicesError, match=r"\(3,\)"):
        x + torch.ones(3)


@torch.inference_mode()
def test_what_a_gpu_would_make_wait_is_counted(simulated_gpu):
    x, rows = SimulatedTensor(torch.arange(3.0)), SimulatedTensor(torch.zeros(3))
    for wait in (
        lambda: x.tolist(),
        lambda: float(x[0]),
        lambda: bool(x.sum() > 0),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x[[0, 2]],
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: rows.copy_(torch.ones(3)),
        lambda: rows.__setitem__(1, 5),
        lambda: rows.__setitem__(SimulatedTensor(torch.tensor([0, 2])), 1.0),
    ):
        simulated_gpu.waits.clear()
        wait()
        assert len(simulated_gpu.waits) == 1
    simulated_gpu.waits.clear()
    rows[1:] = x[SimulatedTensor(torch.tensor([0, 2]))]
    rows[1:] = 3.0  # fills, which needs no copy
    rows[x > 1] = 1.0
    torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)
    assert not simulated_gpu.waits
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ones(1).expand(3).pin_memory()
    assert to_device(torch.ones(1).expand(3), DEVICE).tolist() == [1, 1, 1]


@torch.inference_mode()
def test_what_may_not_be_recorded_is_found(simulated_gpu):
    x = SimulatedTensor(torch.arange(3.0))
    for wrong in (lambda: x.tolist(), lambda: torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)):
        with pytest.raises(AssertionError, match="record"):
            SimulatedGraphs(simulated_gpu).capture(lambda wrong=wrong: simulated_gpu.recording and wrong())
