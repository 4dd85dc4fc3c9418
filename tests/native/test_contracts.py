"""Contracts of the kernels that no output shows: exceptions, memory, arguments that do not fit, addresses."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from longdraft.native import build
from longdraft.native.views import ViewKernels

FOLDER = Path(build.__file__).parent


def test_exceptions_memory_and_dispatch_under_sanitizers(tmp_path):
    program, source = tmp_path / "contracts", Path(__file__).with_name("contracts.cpp")
    isa = build.supported_levels()[-1]
    options = [
        "-std=c++17",
        "-O1",
        "-fopenmp",
        "-Wno-psabi",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    command = ["g++", *options, f"-march={isa}", f"-I{FOLDER}", str(source), "-o", str(program)]
    try:
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no g++")
    if "cannot find" in compiled.stderr:
        pytest.skip("no sanitizers")
    assert compiled.returncode == 0, compiled.stderr
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    ended = subprocess.run([program], capture_output=True, text=True, check=False, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_more_chunks_than_there_are_is_an_error(kernels):
    keys, queries = torch.zeros(1, 1, 1, 64, 16), torch.zeros(1, 1, 1, 16)
    select = ViewKernels(kernels).select_chunks
    assert select("tokens", False, (keys, 0, 64), 16, None, queries, range(4), 4).flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="sizes that do not fit"):
        select("tokens", False, (keys, 0, 64), 16, None, queries, range(4), 5)


def test_rules_of_the_sources():
    """Each function that Python calls ends in a handler, and instruction sets are told apart in isa/ alone."""
    for path in sorted(FOLDER.glob("*.cpp")):
        text = path.read_text(encoding="utf-8")
        bodies = re.findall(r"^Status longdraft_\w+\([^{]*\{.*?^\}.*?$", text, re.DOTALL | re.MULTILINE)
        assert all(body.endswith("} CATCH_EXCEPTIONS") and ") try {" in body for body in bodies), path.name
        assert len(bodies) == text.count("\nStatus longdraft_")
    told_apart = [
        path.name for path in FOLDER.glob("*.[ch]*") if re.search("__AVX|__ARM", path.read_text(encoding="utf-8"))
    ]
    assert not told_apart


def test_a_prefetch_is_compiled(tmp_path):
    """GCC drops calls of a function that only prefetches, unless it is inlined before it is looked at."""
    source = tmp_path / "loop.cpp"
    loop = "for (long i = 0; i < n; i += 64) prefetch<2>(address_of(p) + i);"
    source.write_text(f'#include "vectors.h"\nvoid f(const char *p, long n) {{ {loop} }}\n')
    command = ["g++", "-std=c++17", "-O2", "-Wno-psabi", f"-march={build.supported_levels()[-1]}", f"-I{FOLDER}"]
    try:
        subprocess.run([*command, "-S", str(source), "-o", str(tmp_path / "loop.s")], check=True)
    except FileNotFoundError:
        pytest.skip("no g++")
    assert re.search("prefetch|prfm", (tmp_path / "loop.s").read_text(encoding="utf-8"))
