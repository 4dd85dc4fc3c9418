"""The kernels of a layer's parts compiled for GPUs that are not here, in processes without Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "triton_parts.py"
found = importlib.util.find_spec("triton")
TOOL = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump" if found and found.origin else None
pytestmark = pytest.mark.skipif(TOOL is None or not TOOL.exists(), reason="needs Triton with NVIDIA's tools")
KERNELS = {"norm", "rope", "silu"}
ATTENTION = {"tree", "prefix_sums", "path_sums", "join"}


@pytest.mark.parametrize(
    ("target", "dtype"),
    [pytest.param(t, d, marks=pytest.mark.slow) for t in (80, 90, 100) for d in ("bfloat16", "float16", "float32")],
)
def test_no_kernel_spills_and_each_fits(target, dtype, tmp_path):
    file = tmp_path / "compiled.json"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--targets", str(target), "--dtypes", dtype, "--json", str(file)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert file.exists(), run.stderr[-3000:]
    content = json.loads(file.read_text())
    kernels = KERNELS if dtype == "float32" else {*KERNELS, *ATTENTION}
    assert content["failed"] == [] and {row["kernel"] for row in content["rows"]} == kernels
    assert not [row for row in content["rows"] if row["wrong"]] and run.returncode == 0
    # One operation for a product and a sum would not round the product, as the model's own code does.
    assert not [row for row in content["rows"] if row["kernel"] in KERNELS and row["fma"]]
