"""The Triton kernels compiled for GPUs that are not here: the interpreter accepts much that a compiler refuses.

In processes of their own, since the interpreter, once chosen, serves all of a process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "triton_compiled.py"
PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
found = importlib.util.find_spec("triton")
TOOL = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump" if found and found.origin else None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(TOOL is None or not TOOL.exists(), reason="needs Triton with NVIDIA's tools"),
]


def compiled(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """Rows of the script; none of them spills more than it may, and all fit."""
    file = tmp_path / "compiled.json"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--json", str(file), *options]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert file.exists(), run.stderr[-3000:]
    content = json.loads(file.read_text())
    assert content["failed"] == []
    rows: list[dict[str, Any]] = content["rows"]
    assert not [row for row in rows if row["wrong"]] and run.returncode == 0, run.stderr[-3000:]
    return rows


def attention(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    rows = compiled(tmp_path, *options)
    for row in rows:
        assert row["shared"] <= {80: 163, 90: 227, 100: 227}[row["target"]] * 1024, row
        assert row["registers"] * 32 * row["warps"] <= 65536 and row["programs"] >= 1, row
        # 16-bit products go to the tensor cores; float32 ones must not, where they would lose 13 bits.
        assert bool(row["product"]) == (row["dtype"] != "float32" and row["kernel"] != "merge"), row
    return rows


@pytest.mark.parametrize("target", PRODUCTS)
def test_defaults(target: int, tmp_path: Path) -> None:
    options = "--dtypes", "bfloat16", "--heads", "128", "--sizes", "64", "--defaults", "--targets", str(target)
    rows = attention(tmp_path, *options)
    plain = ("prefix", "", ""), ("block", "tree", ""), ("block", "causal", ""), ("merge", "", "")
    more = ("prefix", "", "windows caps"), ("block", "tree", "caps"), ("block", "causal", "windows caps")
    kinds = ("prefix", ""), ("block", "tree"), ("block", "causal")
    in_int8 = {(*kind, more) for kind in kinds for more in ("int8", "int8 caps")}
    assert {(r["kernel"], r["mask"], r["more"], r["target"]) for r in rows} == {
        (*kernel, target) for kernel in (*plain, *more, *in_int8, ("merge", "", "sinks"))
    }
    for row in rows:
        if row["kernel"] != "merge":
            assert row["product"] == PRODUCTS[row["target"]]  # 64 rows are what the newer instructions want
            assert row["programs"] >= 2  # as many waves of programs are launched


def test_float32_and_numbers_that_are_one(tmp_path: Path) -> None:
    rows = attention(
        tmp_path, "--dtypes", "float32", "--heads", "80", "--sizes", "1", "8", "--defaults", "--targets", "80"
    )
    assert len(rows) >= 8


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(d, h) for d in ("bfloat16", "float16", "float32") for h in (64, 80, 128, 256) if d == "bfloat16" or h != 80],
)
def test_whatever_may_be_launched(tmp_path: Path, dtype: str, head_dim: int) -> None:
    rows = attention(tmp_path, "--dtypes", dtype, "--heads", str(head_dim))
    assert len(rows) >= 30 and {r["target"] for r in rows} == set(PRODUCTS)


PARTS = {"norm", "rope", "silu"}
FIXED_ORDER = {"tree", "prefix_sums", "path_sums", "join"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", PRODUCTS)
def test_the_parts_of_a_layer(target, dtype, tmp_path):
    rows = compiled(tmp_path, "--parts", "--targets", str(target), "--dtypes", dtype)
    assert {row["kernel"] for row in rows} == (PARTS if dtype == "float32" else PARTS | FIXED_ORDER)
    # One operation for a product and a sum would not round the product, as the model's own code does. On an A100,
    # products and sums of bfloat16 are such operations themselves, with -0 or 1.
    assert (target, dtype) == (80, "bfloat16") or not [r for r in rows if r["kernel"] in PARTS and r["fma"]]
