"""llama.cpp as a contender, through the package llama-cpp-python: plain decoding of a GGUF file's own weights."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.contenders import Job, Run
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.host.checkpoints import check_gguf
from longdraft.host.embedded import packaged_file

PACKAGE = "llama_cpp"


def check(file: Path | None) -> None:
    """Refuses what cannot run, before anything is loaded.

    Raises:
        CapabilityError: llama-cpp-python is not installed.
        CheckpointError: no such file, or not a GGUF file.
    """
    try:
        found = importlib.util.find_spec(PACKAGE) is not None
    except ValueError:  # a module without a specification, as a test puts one in
        found = True
    if not found:
        raise CapabilityError(
            "llama-cpp needs the package llama-cpp-python, which is compiled on the way: pip install llama-cpp-python, "
            "or leave llama-cpp out of --methods."
        )
    check_gguf(file or packaged_file())


class LlamaCpp:
    """Decodes one prompt at a time, on as many threads as torch has, or all on the GPU.

    Args:
        file: GGUF; None: that of the embedded model. vocabulary: the target's tokens, whose ids prompts are made of.
        device: the target's.

    Raises:
        CapabilityError: the file has another vocabulary.
        CheckpointError: llama.cpp cannot read it.
    """

    name = "llama-cpp"

    def __init__(self, file: Path | None, vocabulary: int, device: torch.device) -> None:
        self.draft: Path | None = file or packaged_file()
        self._file, self._device = self.draft, device
        self._room = 0
        self._model = self._opened(512)
        if (own := self._model.n_vocab()) != vocabulary:
            raise CapabilityError(
                f"{self._file} has {own} tokens and the model {vocabulary}: name a GGUF file of the same model with "
                "--llama-cpp-model."
            )
        self.note = f"llama.cpp on {self._file.name}, {_precision(self._model)} weights: another model's tokens"

    def comparable(self, greedy: bool, batch: int) -> bool:
        return False  # its weights are rounded

    def cold(self, job: Job) -> Run:
        self.release()
        return self.warm(job)

    def warm(self, job: Job) -> Run:
        (prompt,) = job.prompts
        needed = len(prompt) + job.max_tokens + 1
        if needed > self._room:
            self._model = self._opened(needed)
        sampling = job.sampling
        self._model.set_seed(job.seed)
        tokens: list[int] = []
        times: list[float] = []
        start = time.perf_counter()
        # It keeps what the prompt shares with the last one.
        for token in self._model.generate(
            list(prompt),
            temp=sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p if sampling.top_p is not None else 1.0,
            min_p=sampling.min_p or 0.0,
            repeat_penalty=sampling.repetition_penalty or 1.0,
        ):
            times.append(time.perf_counter())
            tokens.append(int(token))
            if len(tokens) == job.max_tokens or tokens[-1] in job.eos:
                break
        return Run((tuple(tokens),), times[0] - start, times[-1] - times[0], (len(tokens) - 1,))

    def release(self) -> None:
        self._model.reset()

    def _opened(self, room: int) -> Any:
        """The model with a cache of so many tokens."""
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self._room = room
        try:
            return Llama(
                model_path=str(self._file),
                n_ctx=room,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if self._device.type == "cuda" else 0,
                verbose=False,
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise CheckpointError(f"llama.cpp cannot read {self._file} ({error}): give another GGUF file.") from error


def _precision(model: Any) -> str:
    """Of the file's weights, as GGUF names it: ``Q4_1``."""
    number = str(model.metadata.get("general.file_type", ""))
    try:
        from gguf import LlamaFileType

        return str(LlamaFileType(int(number)).name.removeprefix("MOSTLY_").removeprefix("ALL_"))
    except (ImportError, ValueError):
        return f"GGUF file type {number or 'unknown'}"
