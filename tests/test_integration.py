"""``model.generate(..., custom_generate=speculator)`` gives what ``model.generate(...)`` gives."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from longdraft import Speculator
from longdraft.errors import CapabilityError
from tests.tiny import tiny_model, tiny_tokenizer

IDS = torch.tensor([[3, 9, 14, 7, 22, 5] * 6])


@pytest.fixture(params=["ar", "prompt-lookup"])
def spec(request):
    return Speculator(request.param, min_n=1) if request.param == "prompt-lookup" else Speculator(request.param)


def both(model, spec, ids=IDS, **settings):
    """Output of transformers alone and with the speculator, after the same seed."""
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30} | settings
    outputs = []
    for extra in ({}, {"custom_generate": spec}):
        torch.manual_seed(0)
        outputs.append(model.generate(ids, **settings, **extra))
    return outputs


def test_greedy(spec):
    expected, got = both(tiny_model(), spec, do_sample=False)
    assert torch.equal(expected, got)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8, "top_k": 12},
        {"top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 10, "eos_token_id": [7, 22]},
    ],
)
def test_sampling_draws_the_same_text_from_the_same_seed(spec, settings):
    expected, got = both(tiny_model(dtype=torch.float64), spec, do_sample=True, **settings)
    assert torch.equal(expected, got)


def test_greedy_with_processors(spec):
    expected, got = both(tiny_model(), spec, do_sample=False, repetition_penalty=1.2, no_repeat_ngram_size=3)
    assert torch.equal(expected, got)


def test_a_custom_processor_and_eos(spec):
    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 5:20] = float("-inf")
            return scores

    ban = LogitsProcessorList([Ban()])
    expected, got = both(tiny_model(), spec, do_sample=False, logits_processor=ban, eos_token_id=[30, 41, 2])
    assert torch.equal(expected, got)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch(spec, side):
    model = tiny_model(dtype=torch.float64)
    rows = [IDS[0].tolist(), [1, 2, 3], list(range(20))]
    width = max(map(len, rows))
    pad = [[0] * (width - len(r)) for r in rows]
    ids = torch.tensor([p + r if side == "left" else r + p for p, r in zip(pad, rows, strict=True)])
    ones = [[1] * len(r) for r in rows]
    mask = torch.tensor([p + o if side == "left" else o + p for p, o in zip(pad, ones, strict=True)])
    got = model.generate(ids, attention_mask=mask, max_new_tokens=12, pad_token_id=0, custom_generate=spec)
    assert torch.equal(got[:, :width], ids)
    for row, new in zip(rows, got[:, width:], strict=True):
        alone = model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)), max_new_tokens=12)
        assert new.tolist() == alone[0, len(row) :].tolist()


def test_a_batch_pads_what_follows_eos(spec):
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3, 4], [7, 7, 7, 7], [9, 8, 9, 8]])
    free = both(model, spec, ids, do_sample=False)[0]
    eos = int(free[0, 9])
    expected, got = both(model, spec, ids, do_sample=False, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(expected, got)


def test_several_return_sequences_differ(spec):
    got = tiny_model().generate(IDS, do_sample=True, num_return_sequences=3, max_new_tokens=20, custom_generate=spec)
    assert got.shape[0] == 3 and len({tuple(r) for r in got.tolist()}) == 3


def test_stopping_criteria_and_stop_strings(spec):
    class AtLength(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= IDS.shape[1] + 7)

    criteria = StoppingCriteriaList([AtLength()])
    expected, got = both(tiny_model(), spec, do_sample=False, stopping_criteria=criteria)
    assert torch.equal(expected, got) and got.shape[1] == IDS.shape[1] + 7


def test_a_dictionary_on_request(spec):
    expected, got = both(tiny_model(), spec, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(expected.sequences, got.sequences)


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"return_dict_in_generate": True, "output_scores": True}])
def test_what_is_not_supported_is_refused(spec, settings):
    with pytest.raises(CapabilityError):
        tiny_model().generate(IDS, max_new_tokens=5, custom_generate=spec, **settings)


def test_the_three_lines_of_the_readme():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    inputs = tokenizer("abcabcabc", return_tensors="pt", return_token_type_ids=False)
    spec = Speculator.from_pretrained("prompt-lookup", target=model)
    out = model.generate(**inputs, custom_generate=spec, max_new_tokens=16)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=16))
