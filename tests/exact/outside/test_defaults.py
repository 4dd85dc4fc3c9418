"""Nothing depends on torch's default dtype, default device or autocast, which users and other threads change."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

import longdraft
from longdraft import Speculator
from tests.support.methods import ALWAYS_RIGHT, EXACT, SpeculatorsByMethod
from tests.support.recurrent_models import recurrent_model
from tests.support.tiny import tiny_model

SOURCES = Path(longdraft.__file__).parent
# Rooms that make no tensor of a run.
OTHER_ROOMS = ("training", "bench", "cli")
# Factories that take torch's defaults, and those of them that give whole numbers whatever the default is.
FACTORIES = {"empty", "zeros", "ones", "tensor", "full", "rand", "randn", "eye", "linspace", "as_tensor"}
WHOLE = {"arange", "randint", "randperm"}
PROMPT = [3, 9, 14, 7, 22, 5] * 6
NEW = 24


@contextmanager
def default(kind: torch.dtype | str) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        torch.set_default_device(kind) if isinstance(kind, str) else torch.set_default_dtype(kind)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def decoded(method: str, model: Any, **options: Any) -> tuple[list[int], int, int]:
    """Tokens, and how many were drafted and accepted."""
    spec = Speculator(method, target=model, plan="fixed", **options)
    (result,) = spec.generate([PROMPT], max_new_tokens=NEW)
    return result.token_ids, result.drafted, result.accepted


def unsaid(path: Path) -> list[str]:
    """Calls of torch's factories in a file that leave the dtype or the device to torch's defaults."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), []
    # A module's parameters get their device from what makes the module, which may be "meta".
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    parameters = {id(argument) for node in nodes if node.func.attr == "Parameter" for argument in node.args}
    for node in nodes:
        assert isinstance(node.func, ast.Attribute)
        name, said = node.func.attr, {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) != "torch" or name not in FACTORIES | WHOLE or None in said:
            continue
        lacks_dtype = name not in WHOLE and "dtype" not in said
        if lacks_dtype or (id(node) not in parameters and "device" not in said):
            found.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_tensor_of_a_run_has_its_dtype_and_device_said() -> None:
    files = [p for p in SOURCES.rglob("*.py") if p.relative_to(SOURCES).parts[0] not in OTHER_ROOMS]
    assert len(files) > 200
    assert [call for path in files for call in unsaid(path)] == []


def test_every_address_for_a_kernel_is_checked() -> None:
    for path in (SOURCES / "native").glob("*.py"):
        # Int8KV passes on the address of its numbers for comparisons.
        if path.name not in ("boundary.py", "quantized_kv.py"):
            assert "data_ptr" not in path.read_text(encoding="utf-8"), path.name


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> SpeculatorsByMethod:
    return SpeculatorsByMethod(tmp_path_factory.mktemp("drafts"), torch.float32)


@pytest.mark.parametrize(("method", "kind"), zip(EXACT, cycle([torch.float64, torch.bfloat16, "meta"]), strict=False))
def test_methods_under_other_defaults(methods: SpeculatorsByMethod, method: str, kind: torch.dtype | str) -> None:
    """Speculators are made under these defaults, and read their drafts."""
    options = methods.options(method)
    expected = decoded(method, methods.model, **options)
    assert method == "ar" or expected[1] > expected[2] or method in ALWAYS_RIGHT
    with default(kind):
        assert decoded(method, methods.model, **options) == expected


MODELS: dict[str, Any] = {
    "windows": lambda: tiny_model("gemma3"), "recurrent": recurrent_model,
    "half": lambda: tiny_model(dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), zip(MODELS, ["meta", torch.bfloat16, torch.float64], strict=True))
def test_models_are_hosted_under_other_defaults(family: str, kind: torch.dtype | str) -> None:
    expected, other = decoded("prompt-lookup", MODELS[family](), min_n=1), MODELS[family]()
    assert expected[1]
    with default(kind):
        assert decoded("prompt-lookup", other, min_n=1) == expected


def test_while_another_thread_loads_a_model_in_16_bits(tmp_path: Path) -> None:
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = tiny_model(layers=4)
    expected = decoded("prompt-lookup", model, min_n=1)
    done, loaded = threading.Event(), threading.Event()

    def load() -> None:
        while not done.is_set():
            torch.set_default_dtype(torch.bfloat16)  # as transformers does, for longer
            type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
            torch.set_default_dtype(torch.float32)
            loaded.set()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(6):
            assert decoded("prompt-lookup", model, min_n=1) == expected
    finally:
        done.set()
        thread.join()
        torch.set_default_dtype(torch.float32)
    assert loaded.is_set()
