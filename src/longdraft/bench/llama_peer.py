"""llama.cpp as a contender, through the package llama-cpp-python."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch

from longdraft.bench import precision
from longdraft.bench.contenders import Job, Run
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.checkpoints import check_gguf
from longdraft.model.embedded import packaged_file


def check(file: Path | None) -> None:
    """Refuses a run that cannot work, before anything is loaded.

    Raises:
        CapabilityError: llama-cpp-python is not installed.
        CheckpointError: no such file, or not a GGUF file.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise CapabilityError(
            "llama-cpp needs the package llama-cpp-python, which is compiled on the way: pip install "
            "llama-cpp-python, or leave llama-cpp out of --methods."
        )
    check_gguf(file or packaged_file())


class LlamaCpp:
    """Plain decoding, on as many threads as torch has, or all on the GPU.

    Args:
        file: GGUF; None: that of the embedded model. vocabulary: the target's tokens, whose ids prompts are made of.
        device: the target's.

    Raises:
        CapabilityError: the file has another vocabulary.
        CheckpointError: llama.cpp cannot read it.
    """

    name = "llama-cpp"

    def __init__(self, file: Path | None, vocabulary: int, device: torch.device) -> None:
        self.file = file or packaged_file()
        self.draft: Path | None = self.file
        self._device = device
        self._room = 0
        self._model = self._opened(512)
        if (own := self._model.n_vocab()) != vocabulary:
            raise CapabilityError(
                f"{self.file} has {own} tokens and the model {vocabulary}: name a GGUF file of the same model "
                "with --gguf."
            )
        weights = precision.of_file_type(self._model.metadata.get("general.file_type", ""))
        self.note = (
            f"llama.cpp on {self.file.name}, {weights} weights; it rounds in its own way, so its tokens are others"
        )

    def comparable(self, greedy: bool, batch: int) -> bool:
        return False  # its weights and its arithmetic are rounded

    def cold(self, job: Job) -> Run:
        self.release()
        return self.warm(job)

    def release(self) -> None:
        self._model.reset()

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
        return Run.streamed(tuple(tokens), job, start, times, [1] * len(tokens))

    def _opened(self, room: int) -> Any:
        """The model, with a cache of ``room`` tokens."""
        from llama_cpp import Llama

        threads = torch.get_num_threads()
        self._room = room
        try:
            return Llama(
                model_path=str(self.file),
                n_ctx=room,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if self._device.type == "cuda" else 0,
                verbose=False,
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise CheckpointError(f"llama.cpp cannot read {self.file} ({error}): give another GGUF file.") from error
