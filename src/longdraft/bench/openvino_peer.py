"""OpenVINO GenAI as a contender: plain decoding, and its prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from longdraft.bench import precision
from longdraft.bench.contenders import Job, Run, trimmed
from longdraft.bench.gguf_peer import GGUFPeer
from longdraft.errors import CheckpointError
from longdraft.model import gguf_files

PACKAGE = "openvino_genai"
MISSING = (
    "openvino and openvino-lookup need the package openvino-genai: pip install openvino-genai, or leave them out of "
    "--methods."
)


class OpenVINO(GGUFPeer):
    """Plain decoding on the CPU, on as many threads as torch has; precisions are OpenVINO's own choice.

    Every run reads the prompt again, which is not in the decode seconds: what OpenVINO keeps of prompts cannot be given
    up, and a first token would come from it.

    Args:
        file: GGUF; None: that of the embedded model. vocabulary: the target's tokens, whose ids prompts are made of.

    Raises:
        CapabilityError: the file has another vocabulary.
        CheckpointError: OpenVINO cannot read it.
    """

    name = "openvino"
    _pipeline_options: dict[str, Any] = {}  # noqa: RUF012
    _generation_options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, file: Path | None, vocabulary: int) -> None:
        super().__init__(file)
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 2**31  # a prompt in one piece, as without a scheduler of one's own
        try:
            self._pipeline = genai.LLMPipeline(
                str(self.file),
                "CPU",
                INFERENCE_NUM_THREADS=torch.get_num_threads(),
                scheduler_config=scheduler,
                **self._pipeline_options,
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise CheckpointError(f"OpenVINO cannot read {self.file} ({reason}): give another GGUF file.") from error
        self.check_tokens(len(self._pipeline.get_tokenizer().get_vocab()), vocabulary)
        self.note = (
            f"OpenVINO GenAI on {self.file.name}, {_weights(self.file)} weights, {_computing()}; it rounds in its own "
            "way, so its tokens are others"
        )

    def warm(self, job: Job) -> Run:
        import openvino
        import openvino_genai as genai

        tokens: list[int] = []
        times: list[float] = []
        counts: list[int] = []

        class Clock(genai.StreamerBase):
            def write(self, token: int | Sequence[int]) -> Any:
                new = [token] if isinstance(token, int) else list(token)
                times.append(time.perf_counter())
                counts.append(len(new))
                tokens.extend(new)
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        config = genai.GenerationConfig()
        for name, value in (_settings(job) | self._generation_options).items():
            setattr(config, name, value)
        ids = openvino.Tensor(torch.tensor(job.prompts, dtype=torch.int64).numpy())
        start = time.perf_counter()
        self._pipeline.generate(ids, config, Clock())
        return Run.streamed(trimmed(tokens, job.eos)[: job.max_tokens], job, start, times, counts)

    def release(self) -> None:
        pass


class OpenVINOLookup(OpenVINO):
    """With drafts from the text itself, at the settings of OpenVINO's own sample."""

    name = "openvino-lookup"
    _pipeline_options = {"prompt_lookup": True}  # noqa: RUF012
    _generation_options = {"num_assistant_tokens": 5, "max_ngram_size": 3}  # noqa: RUF012


def _settings(job: Job) -> dict[str, Any]:
    """Of OpenVINO's ``GenerationConfig``. What is left out has no effect."""
    sampling = job.sampling
    settings: dict[str, Any] = {
        "max_new_tokens": job.max_tokens,
        "ignore_eos": not job.eos,
        "stop_token_ids": set(job.eos),
        "do_sample": not sampling.greedy,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
    }
    if not sampling.greedy:
        given = {"top_k": sampling.top_k or None, "top_p": sampling.top_p, "min_p": sampling.min_p}
        settings |= {"temperature": sampling.temperature, "rng_seed": job.seed}
        settings |= {name: value for name, value in given.items() if value is not None}
    return settings


@cache
def _weights(file: Path) -> str:
    found = gguf_files.File(file).file_type
    return precision.of_file_type("" if found is None else found)


def _computing() -> str:
    """What OpenVINO has chosen for this processor."""
    from openvino import Core

    core = Core()
    computed, kept = (
        core.get_property("CPU", n).get_type_name() for n in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
    )
    return f"computed in {computed}, KV in {kept}"
