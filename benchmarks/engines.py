"""Other engines that real_models.py compares longdraft with. The user installs them.

llama.cpp       its llama-bench (cmake -DGGML_NATIVE=ON, target llama-bench).
ik_llama.cpp    its llama-bench, with weights interleaved at load (-rtr 1).
OpenVINO GenAI  the Python of an environment with openvino-genai, which reads GGUF files.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Protocol

# For an input line [prompt tokens, new tokens] it prints [seconds of the prefill, seconds of each new token].
SERVER = """
import json, sys
import numpy, openvino, openvino_genai as genai
path, threads = sys.argv[1], int(sys.argv[2])
pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
print(json.dumps({"version": openvino.__version__}), flush=True)
for line in sys.stdin:
    read, new = json.loads(line)
    ids = numpy.random.default_rng().integers(1000, 20000, (1, read))  # it remembers prompts
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
    figures = pipeline.generate(inputs, config).perf_metrics
    print(json.dumps([figures.get_ttft().mean / 1000, figures.get_tpot().mean / 1000]), flush=True)
"""


class Engine(Protocol):
    """An engine with a model.

    Attributes:
        build: version and build as the engine reports them; empty before the first measurement.
    """

    build: dict[str, Any]

    def prefill_rate(self, tokens: int) -> float:
        """Tokens a second of the prefill of a prompt."""

    def decode_rate(self, tokens: int, depth: int) -> float:
        """Tokens a second of plain decoding behind ``depth`` tokens."""


class LlamaBench:
    """llama-bench of llama.cpp, or of ik_llama.cpp, whose option for the depth is another."""

    def __init__(self, program: Path, model: Path, threads: int, ik: bool = False) -> None:
        self.build: dict[str, Any] = {}
        self._ik, self._command = ik, [program, "-m", model, "-t", threads, "-fa", 1, *(("-rtr", 1) if ik else ())]

    def prefill_rate(self, tokens: int) -> float:
        return self._rate("-p", tokens, "-n", 0)

    def decode_rate(self, tokens: int, depth: int) -> float:
        if self._ik:
            return self._rate("-p", 0, "-n", 0, "-gp", f"{depth},{tokens}")
        return self._rate("-p", 0, "-n", tokens, "-d", depth)

    def _rate(self, *words: object) -> float:
        command = [str(word) for word in (*self._command, *words, "-r", 1, "-o", "json")]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        (found,) = json.loads(done.stdout)
        self.build = {name: found.get(name) for name in ("build_commit", "build_number", "model_type")}
        return float(found["avg_ts"])


class OpenVino:
    """OpenVINO GenAI, in a process that keeps the model."""

    def __init__(self, python: Path, model: Path, threads: int) -> None:
        self.build: dict[str, Any] = {}
        self._command = [str(python), "-c", SERVER, str(model), str(threads)]
        self._process: subprocess.Popen[str] | None = None

    def prefill_rate(self, tokens: int) -> float:
        return tokens / self._seconds(tokens, 1)[0]

    def decode_rate(self, tokens: int, depth: int) -> float:
        return 1 / self._seconds(depth, tokens + 1)[1]

    def _seconds(self, read: int, new: int) -> tuple[float, float]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
            self.build = self._answer()
        assert self._process.stdin is not None
        print(json.dumps([read, new]), file=self._process.stdin, flush=True)
        first, each = self._answer()
        return first, each

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", "[")):  # it prints of itself too
                return json.loads(line)
        raise SystemExit(f"{self._command[0]} ended: OpenVINO GenAI read no model, or not this one")
