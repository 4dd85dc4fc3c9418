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
TARGETS = 80, 90, 100
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


PARTS = {"norm", "rope", "silu", "top_p"}
IN_16_BITS = {
    "linear",
    "tree_attention",
    "dequantize_int8",
    "dequantize_int4",
    "prefix_attention",
    "path_attention",
    "merge_splits",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_parts_of_a_layer(target, dtype, tmp_path):
    rows = compiled(tmp_path, "--targets", str(target), "--dtypes", dtype)
    assert {row["kernel"] for row in rows} == (PARTS if dtype == "float32" else PARTS | IN_16_BITS)
    # One operation for a product and a sum would not round the product, as the model's own code does. On an A100,
    # products and sums of bfloat16 are such operations themselves, with -0 or 1.
    assert (target, dtype) == (80, "bfloat16") or not [r for r in rows if r["kernel"] in PARTS and r["fma"]]
