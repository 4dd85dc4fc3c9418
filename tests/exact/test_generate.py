"""``model.generate(..., custom_generate=speculator)`` gives what ``model.generate(...)`` gives, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
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
    TextIteratorStreamer,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from longdraft import Speculator
from longdraft.errors import CapabilityError
from tests.support.methods import EXACT, SpeculatorsByMethod
from tests.support.tiny import FAMILIES, generate_tokens, tiny_model, tiny_tokenizer

PAD = 0
PROMPTS = [[3, 9, 14, 7, 22, 5] * 3, [8, 6, 8, 6, 8, 6, 8, 30], [(7 * i * i + 3) % 59 + 1 for i in range(13)]]


def padded(*prompts: list[int]) -> dict[str, torch.Tensor]:
    """Prompts as a tokenizer pads them on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


ONE, TWO, THREE = padded(PROMPTS[0]), padded(*PROMPTS[:2]), padded(*PROMPTS)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12}


class BansByCall(LogitsProcessor):
    """A processor with a state: it bans other tokens at each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[:, self.calls % 7 :: 7] = -torch.inf
        return scores


class StopsAtLengths(StoppingCriteria):
    """Depends on a sequence's index in the batch."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


class StopsAtCall(StoppingCriteria):
    """A criterion with a state: it ends all sequences at one call."""

    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.last -= 1
        return torch.full((input_ids.shape[0],), self.last <= 0)


@dataclass
class Case:
    """A call of ``generate``.

    Attributes:
        inputs: input_ids and attention_mask of the prompts.
        settings: keywords; a function if they have a state, so that each call gets new ones.
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
    "sampled_padded": Case({k: v[1:] for k, v in TWO.items()}, SAMPLED | {"repetition_penalty": 1.4}),
    "repetition": Case(THREE, {"repetition_penalty": 1.4}),
    # processors built for the batch, of one row
    "encoder_repetition": Case(ONE, {"encoder_repetition_penalty": 1.5}),
    "encoder_ngrams": Case(ONE, {"encoder_no_repeat_ngram_size": 1}),
    "several": Case(ONE, SAMPLED | {"repetition_penalty": 1.4, "prefix_allowed_tokens_fn": allowed}),
    # processors with a state
    "guidance": Case(ONE, {"guidance_scale": 1.7}),
    "guidance_negative": Case(
        ONE, {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[4, 5, 6]]), "use_cache": False}
    ),
    "synthid": Case(THREE, lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(2, list(range(20)), 8)}),
    "watermark": Case(TWO, lambda: {"watermarking_config": WatermarkingConfig(bias=6.0)}),
    "own_state": Case(THREE, lambda: {"logits_processor": processors(BansByCall())}),
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
        ONE, lambda: {"eos_token_id": list(range(10)), "stopping_criteria": StoppingCriteriaList([StopsAtLengths(23)])}
    ),
    "stop_strings": Case(THREE, {"stop_strings": ["a", "b", "e", "i", "o", "t"], "tokenizer": tiny_tokenizer()}),
    "stop_strings_eos": Case(
        THREE, {"stop_strings": ["a", "c", "x"], "tokenizer": tiny_tokenizer(), "eos_token_id": [20, 30, 40, 50]}
    ),
    "stop_string_criteria": Case(
        THREE,
        lambda: {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(tiny_tokenizer(), ["a", "b", "e"])])},
    ),
    "joint": Case(ONE, lambda: {"stopping_criteria": StoppingCriteriaList([StopsAtLengths(22)])}),
    "calls": Case(ONE, lambda: {"stopping_criteria": StoppingCriteriaList([StopsAtCall(5)])}),
    "longer": Case(THREE, lambda: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(31)])}),
    "positions": Case(
        TWO | {"position_ids": (TWO["attention_mask"].cumsum(-1) - 1).clamp_min(0)},
        {"logits_to_keep": 1, "use_cache": False},
    ),
}


class RecordingStreamer(BaseStreamer):
    """Records what it receives."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.received.append(value.tolist())

    def end(self) -> None:
        self.received.append("end")


@pytest.mark.parametrize("case", CASES)
def test_each_setting_of_generate(specs: SpeculatorsByMethod, forwards, case: str) -> None:
    expected = CASES[case].run(specs.model)
    # The setting changes the output, so that ignoring it would show.
    if case not in ("greedy", "positions"):
        assert not torch.equal(expected, Case(CASES[case].inputs, {}).run(specs.model))
    for method in ("prompt-lookup", "small-lm"):
        forwards.clear()
        assert torch.equal(expected, CASES[case].run(specs.model, custom_generate=specs.get(method))), method
    verified = [f for f in forwards if not f.prompt and f.context_length == specs.get("ar").runner().context_length]
    assert any(f.rows > 1 for f in verified), "nothing was drafted"


@pytest.mark.parametrize("method", EXACT)
def test_every_method(specs: SpeculatorsByMethod, method: str) -> None:
    for case in ("eos", "several"):
        got = CASES[case].run(specs.model, custom_generate=specs.get(method))
        assert torch.equal(CASES[case].run(specs.model), got), case


@pytest.mark.parametrize("case", ["sampled", "several", "joint"])
def test_a_streamer_hears_what_generate_tells_it(specs: SpeculatorsByMethod, case: str) -> None:
    alone = RecordingStreamer()
    CASES[case].run(specs.model, streamer=alone)
    for method in ("ar", "small-lm"):
        ours = RecordingStreamer()
        CASES[case].run(specs.model, streamer=ours, custom_generate=specs.get(method))
        assert alone.received == ours.received


# --- other features of transformers ---


@pytest.fixture
def spec() -> Speculator:
    return Speculator("prompt-lookup", min_n=1)


def test_a_batch_that_is_padded_on_the_right(spec: Speculator) -> None:
    model, width = tiny_model(), max(map(len, PROMPTS))
    ids = torch.tensor([r + [PAD] * (width - len(r)) for r in PROMPTS])
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in PROMPTS])
    got = model.generate(ids, attention_mask=mask, max_new_tokens=12, pad_token_id=PAD, custom_generate=spec)
    assert torch.equal(got[:, :width], ids)
    assert got[:, width:].tolist() == [generate_tokens(model, row, 12) for row in PROMPTS]


def test_several_return_sequences_differ_and_come_in_a_dictionary_on_request(spec: Speculator) -> None:
    settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 20, "custom_generate": spec}
    got = tiny_model().generate(**ONE, return_dict_in_generate=True, **settings).sequences
    assert got.shape[0] == 3 and len({tuple(r) for r in got.tolist()}) == 3


def test_a_sampled_batch_is_the_same_each_time_whatever_is_drafted(specs: SpeculatorsByMethod) -> None:
    case = Case(THREE, SAMPLED | {"eos_token_id": list(range(12)), "max_new_tokens": 20})
    found = [case.run(specs.model, custom_generate=specs.get(name)) for name in ("ar", "ar", "small-lm")]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("prefix_allowed_tokens_fn", {"prefix_allowed_tokens_fn": allowed}),
        ("encoder_repetition_penalty", {"encoder_repetition_penalty": 1.5}),
        ("encoder_no_repeat_ngram_size", {"encoder_no_repeat_ngram_size": 1}),
        ("guidance_scale", {"guidance_scale": 1.7}),
        ("StopsAtCall", {"stopping_criteria": StoppingCriteriaList([StopsAtCall(5)])}),
        ("streamer", {"streamer": RecordingStreamer()}),
    ],
)
def test_what_looks_at_all_rows_of_a_batch_is_refused_by_name(spec: Speculator, name: str, settings: Any) -> None:
    with pytest.raises(CapabilityError, match=name):
        Case(THREE, settings).run(tiny_model(), custom_generate=spec)


def test_a_reader_of_a_stream_gets_the_text_and_an_end(spec: Speculator) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    settings = {"max_new_tokens": 12, "streamer": streamer, "custom_generate": spec}
    thread = Thread(target=model.generate, kwargs=ONE | settings)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(generate_tokens(model, PROMPTS[0], 12))
    refused = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    with pytest.raises(CapabilityError):  # and an end when the call is refused
        model.generate(**ONE, streamer=refused, penalty_alpha=0.5, top_k=3, custom_generate=spec)
    assert "".join(refused) == ""


def test_a_time_limit_ends_all_rows_together(spec: Speculator) -> None:
    got = tiny_model().generate(**TWO, max_new_tokens=100, max_time=1e-9, pad_token_id=PAD, custom_generate=spec)
    assert got.shape[1] == TWO["input_ids"].shape[1] + 1


def test_the_processors_of_a_batch_of_one_are_the_users_own(spec: Speculator) -> None:
    seen: list[Any] = []

    def recorder(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.shape)
        return scores

    for extra in ({}, {"custom_generate": spec}):
        tiny_model().generate(**ONE, max_new_tokens=9, logits_processor=[recorder], **extra)
    assert len(seen) == 18 and seen[:9] == seen[9:]


def test_plain_decoding_of_every_family_is_generates_own() -> None:
    for family in FAMILIES:
        model = tiny_model(family)
        results = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=24)
        assert [r.token_ids for r in results] == [generate_tokens(model, row, 24) for row in PROMPTS]
        assert {r.mean_accepted_length for r in results} == {1.0}
