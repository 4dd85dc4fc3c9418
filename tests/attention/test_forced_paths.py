"""A forced attention path is the path of the forwards, also where the whole model could be one call of a kernel."""

from __future__ import annotations

import pytest

from longdraft import Speculator
from longdraft.attention import dispatch
from longdraft.cli.kernel_report import kernel_report
from tests.support.tiny import tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 4


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, set()),  # fused layers: no attention function is called
        ({"LONGDRAFT_ATTENTION": "sdpa"}, {("prompt", "sdpa"), ("tree", "sdpa")}),
        ({"LONGDRAFT_FUSION": "off"}, {("prompt", "cpu"), ("tree", "cpu")}),
        (
            {"LONGDRAFT_ATTENTION": "sdpa", "LONGDRAFT_PREFILL_ATTENTION": "default"},
            {("prompt", "cpu"), ("tree", "sdpa")},
        ),
        (
            {"LONGDRAFT_ATTENTION": "default", "LONGDRAFT_PREFILL_ATTENTION": "sdpa"},
            {("prompt", "sdpa"), ("tree", "cpu")},
        ),
    ],
)
def test_a_forced_path_computes_prompts_and_verifications(variables, expected, monkeypatch):
    called = set()

    def recorded(name, attend):
        def run(q, keys, values, batch, *args):
            called.add(("prompt" if batch.is_prefill else "tree", name))
            return attend(q, keys, values, batch, *args)

        return run

    model = tiny_model("llama")
    if Speculator("ar", model).runner().execution_model.fused.stack is None:
        pytest.skip("this machine has no kernels that compute the whole model")
    for name, attend in list(dispatch.PATHS.items()):
        monkeypatch.setitem(dispatch.PATHS, name, recorded(name, attend))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert kernel_report(Speculator("ar", model).runner()).whole == (not variables)
    results = {}
    for method in ("ar", "prompt-lookup"):
        called.clear()
        (results[method],) = Speculator(method, model).generate([PROMPT], max_new_tokens=24)
        assert called == expected
    assert results["prompt-lookup"].token_ids == results["ar"].token_ids and results["prompt-lookup"].accepted
