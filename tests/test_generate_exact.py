"""``model.generate`` with and without us, token by token: every exact method, all that ``generate`` can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from tests.exact_methods import EXACT, Specs, specs
from tests.quick import in_turn
from tests.tiny import tiny_tokenizer

__all__ = ["specs"]  # a fixture

PAD = 0
ROWS = [[3, 9, 14, 7, 22, 5] * 3, [8, 6, 8, 6, 8, 6, 8, 30], [(7 * i * i + 3) % 59 + 1 for i in range(13)]]


def padded(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Rows as a tokenizer pads them on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


ONE, TWO, THREE = padded(ROWS[0]), padded(*ROWS[:2]), padded(*ROWS)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12}


class Counts(LogitsProcessor):
    """Has a state: bans another token at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 7 :: 7] = -torch.inf
        return scores


class Lengths(StoppingCriteria):
    """Tells rows apart by their place in the batch."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


class Calls(StoppingCriteria):
    """Has a state: ends all rows at a call."""

    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.last -= 1
        return torch.full((input_ids.shape[0],), self.last <= 0)


@dataclass
class Case:
    """A call of ``generate``.

    Attributes:
        inputs: of the prompt.
        settings: keywords; a function makes them anew for each call, where they have a state.
    """

    inputs: dict[str, torch.Tensor]
    settings: dict[str, Any] | Callable[[], dict[str, Any]]

    def run(self, model: Any, **extra: Any) -> Any:
        settings = self.settings() if callable(self.settings) else self.settings
        torch.manual_seed(0)
        return model.generate(**self.inputs, **({"max_new_tokens": 7, "pad_token_id": PAD} | settings), **extra)


def allowed(row: int, text: torch.Tensor) -> list[int]:
    return [t for t in range(61) if t % 3 != row and t != int(text[-1])]


def processors(*each: LogitsProcessor) -> LogitsProcessorList:
    return LogitsProcessorList(each)


CASES = {
    "greedy": Case(THREE, {}),
    "sampled": Case(ONE, SAMPLED | {"top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 0.001}),
    "sampled_batch": Case(THREE, SAMPLED | {"eos_token_id": list(range(12))}),
    # processors built for the batch
    "repetition": Case(THREE, {"repetition_penalty": 1.4}),
    "repetition_one_padded": Case(
        {k: v[1:] for k, v in TWO.items()}, SAMPLED | {"repetition_penalty": 1.4, "num_return_sequences": 2}
    ),
    "encoder_repetition": Case(THREE, {"encoder_repetition_penalty": 1.5}),
    "encoder_ngrams": Case(THREE, {"encoder_no_repeat_ngram_size": 1}),
    "prefix": Case(THREE, {"prefix_allowed_tokens_fn": allowed}),
    "several": Case(
        TWO,
        SAMPLED
        | {"repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2}
        | {"prefix_allowed_tokens_fn": allowed, "num_return_sequences": 2},
    ),
    # processors with a state
    "guidance": Case(THREE, {"guidance_scale": 1.7}),
    "guidance_negative": Case(
        TWO, {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[4, 5, 6], [9, 9, 1]]), "use_cache": False}
    ),
    "synthid": Case(THREE, lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(2, list(range(20)), 8)}),
    "watermark": Case(TWO, lambda: {"watermarking_config": WatermarkingConfig(bias=6.0)}),
    "own_state": Case(THREE, lambda: {"logits_processor": processors(Counts())}),
    # and others
    "lengths": Case(
        THREE,
        {
            "min_new_tokens": 4,
            "eos_token_id": list(range(20)),
            "exponential_decay_length_penalty": (5, 1.3),
            "forced_eos_token_id": 3,
        },
    ),
    "bans": Case(
        THREE,
        {
            "no_repeat_ngram_size": 2,
            "bad_words_ids": [[5], [7, 22]],
            "sequence_bias": [[[9], 2.0], [[8, 6], -4.0]],
            "suppress_tokens": [11],
            "begin_suppress_tokens": [12, 13],
            "renormalize_logits": True,
            "remove_invalid_values": True,
        },
    ),
    # ends
    "eos": Case(THREE, {"eos_token_id": list(range(15)), "max_new_tokens": 16}),
    "eos_joint": Case(
        THREE,
        lambda: {"eos_token_id": list(range(10)), "stopping_criteria": StoppingCriteriaList([Lengths(23, 20, 22)])},
    ),
    "stop_strings": Case(THREE, {"stop_strings": ["a", "b", "e", "i", "o", "t"], "tokenizer": tiny_tokenizer()}),
    "stop_strings_eos": Case(
        THREE, {"stop_strings": ["a", "c", "x"], "tokenizer": tiny_tokenizer(), "eos_token_id": [20, 30, 40, 50]}
    ),
    "stop_string_criteria": Case(
        THREE,
        lambda: {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(tiny_tokenizer(), ["a", "b", "e"])])},
    ),
    "joint": Case(THREE, lambda: {"stopping_criteria": StoppingCriteriaList([Lengths(19, 23, 21)])}),
    "calls": Case(THREE, lambda: {"stopping_criteria": StoppingCriteriaList([Calls(5)])}),
    "longer": Case(THREE, lambda: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(31)])}),
    "positions": Case(
        TWO | {"position_ids": (TWO["attention_mask"].cumsum(-1) - 1).clamp_min(0)},
        {"logits_to_keep": 1, "use_cache": False},
    ),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """Outputs of transformers alone, computed once a case."""
    return {}


class Heard(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@pytest.mark.parametrize(("case", "method"), in_turn(CASES, EXACT, each=3, both=("greedy", "sampled_batch")))
def test_tokens_are_those_of_generate(specs: Specs, expected: dict[str, torch.Tensor], method: str, case: str) -> None:
    if case not in expected:
        expected[case] = CASES[case].run(specs.model)
    got = CASES[case].run(specs.model, custom_generate=specs.get(method))
    assert torch.equal(expected[case], got)


@pytest.mark.parametrize("case", ["sampled", "eos", "joint"])
@pytest.mark.parametrize("method", ["ar", "small-lm", "specpv-exact"])
def test_a_streamer_hears_what_generate_tells_it(specs: Specs, method: str, case: str) -> None:
    alone, ours = Heard(), Heard()
    CASES[case].run(specs.model, streamer=alone)
    CASES[case].run(specs.model, streamer=ours, custom_generate=specs.get(method))
    assert alone.heard == ours.heard


def test_cases_say_something(specs: Specs) -> None:
    """Each setting changes the text, so that a method that ignored it would be found out."""
    same = {"greedy", "positions"}
    for name, case in CASES.items():
        plain = Case(case.inputs, {}).run(specs.model)
        assert name in same or not torch.equal(plain, case.run(specs.model)), name
