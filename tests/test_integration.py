"""``model.generate(..., custom_generate=speculator)`` gives what ``model.generate(...)`` gives."""

from __future__ import annotations

import inspect
from threading import Thread

import pytest
import torch
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    DynamicCache,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from longdraft import Speculator
from longdraft.errors import CapabilityError, PromptError
from longdraft.integration import Given, requests
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


def test_several_return_sequences_differ(spec):
    got = tiny_model().generate(IDS, do_sample=True, num_return_sequences=3, max_new_tokens=20, custom_generate=spec)
    assert got.shape[0] == 3 and len({tuple(r) for r in got.tolist()}) == 3


def test_a_dictionary_on_request(spec):
    expected, got = both(tiny_model(), spec, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(expected.sequences, got.sequences)


class Uncopied(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores

    def __deepcopy__(self, memo):
        raise TypeError("it holds a socket")


@torch.no_grad()
def used(processor):
    """A processor that has seen a step of another text."""
    processor(torch.tensor([[1, 2]]), torch.zeros(1, 61))
    return processor


REFUSED = {
    "beams": ({"num_beams": 2}, "not by beam search: leave num_beams out"),
    "beam sample": ({"num_beams": 2, "do_sample": True}, "num_beams"),
    "groups": ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.1}, "num_beam_groups"),
    "forced words": ({"num_beams": 2, "force_words_ids": [[3]]}, "force_words_ids"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search: leave penalty_alpha out"),
    "DoLa": ({"dola_layers": "low"}, "dola_layers"),
    "lookups of transformers": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "assistant": (lambda m: {"assistant_model": m}, "assisted generation: leave assistant_model"),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits"),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "a new cache": (lambda m: {"past_key_values": DynamicCache(config=m.config)}, "leave cache"),
    "other positions": ({"position_ids": torch.arange(5, 41)[None]}, "leave position_ids out"),
    "rows of logits": ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep"),
    "processes in step": ({"synced_gpus": True}, "synced_gpus"),
    "two forwards": (
        {"logits_processor": LogitsProcessorList([ClassifierFreeGuidanceLogitsProcessor(1.5)])},
        "ClassifierFreeGuidanceLogitsProcessor does not take",
    ),
}


def test_a_cache_that_rounds_is_refused():
    """Asked for where a package for it is installed; generate itself refuses it elsewhere."""
    config = GenerationConfig(cache_implementation="quantized")
    with pytest.raises(CapabilityError):
        requests.check(config, {}, IDS, Given())


def ignoring(*lengths):
    try:
        return RepetitionPenaltyLogitsProcessor(1.5, torch.tensor(lengths))
    except ValueError:
        pytest.skip("this version of transformers ignores as many tokens of every row")


IN_A_BATCH = {
    "no copy": ({"logits_processor": [Uncopied()]}, r"Uncopied cannot be copied \(it holds a socket\)"),
    "ignored lengths": (lambda m: {"logits_processor": [ignoring(1, 2, 3)]}, "is for 3 rows"),
    "prompts of the penalty": (
        {"logits_processor": [EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.ones(3, 2, dtype=torch.long))]},
        "is for 3 rows",
    ),
    "prompts of the n-grams": (
        {"logits_processor": [EncoderNoRepeatNGramLogitsProcessor(2, torch.ones(3, 2, dtype=torch.long))]},
        "is for 3 rows",
    ),
    "negative prompts": ({"guidance_scale": 2.0, "negative_prompt_ids": IDS[:, :4]}, "negative prompts .* are 1"),
    "a used watermark": (
        lambda m: {"logits_processor": [used(SynthIDTextWatermarkingConfig(2, [3]).construct_processor(61, "cpu"))]},
        "state of another batch",
    ),
    "used guidance": (
        lambda m: {"logits_processor": [used(UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, m))]},
        "cache of another text",
    ),
    "no padding": ({"stopping_criteria": [EosTokenCriteria(7)]}, "give pad_token_id"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "what"), [*((1, name) for name in REFUSED), *((2, name) for name in IN_A_BATCH)])
def test_what_is_not_supported_is_refused_before_work_begins(forwards, rows, what):
    settings, message = (REFUSED if rows == 1 else IN_A_BATCH)[what]
    model = tiny_model()
    settings = settings(model) if callable(settings) else settings
    with pytest.raises(CapabilityError, match=message):
        model.generate(IDS.repeat(rows, 1), max_new_tokens=5, custom_generate=Speculator("ar"), **settings)
    assert not forwards


@pytest.mark.parametrize(
    "ids", [torch.tensor([[3, -1, 4]]), torch.tensor([[3, 61]]), torch.empty(0, 4, dtype=torch.long)]
)
def test_token_ids_that_are_none_are_refused(spec, ids):
    with pytest.raises(PromptError):
        tiny_model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, custom_generate=spec)


def test_a_reader_of_a_stream_gets_the_text_and_an_end(spec):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    settings = {"max_new_tokens": 12, "streamer": streamer, "custom_generate": spec}
    thread = Thread(target=model.generate, args=(IDS,), kwargs=settings)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(IDS, max_new_tokens=12)[0, IDS.shape[1] :])


def test_a_reader_of_a_stream_gets_an_end_when_the_call_is_refused(spec):
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=20)
    with pytest.raises(CapabilityError):
        tiny_model().generate(
            IDS, max_new_tokens=12, streamer=streamer, penalty_alpha=0.5, top_k=3, custom_generate=spec
        )
    assert "".join(streamer) == ""


def test_the_signature_says_what_a_loop_takes():
    assert "tokenizer" in inspect.signature(Speculator("ar")).parameters
    assert "method" in inspect.signature(Speculator).parameters


def test_a_time_limit_ends_all_rows_together(spec):
    got = tiny_model().generate(IDS.repeat(2, 1), max_new_tokens=100, max_time=1e-9, custom_generate=spec)
    assert got.shape[1] == IDS.shape[1] + 1


def test_the_processors_of_a_batch_of_one_are_the_users_own(spec):
    class Recorder(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids.shape)
            return scores

    recorders = Recorder(), Recorder()
    for recorder, extra in zip(recorders, ({}, {"custom_generate": spec}), strict=True):
        tiny_model().generate(IDS, max_new_tokens=9, logits_processor=[recorder], **extra)
    assert recorders[0].seen == recorders[1].seen


def test_the_three_lines_of_the_readme():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    inputs = tokenizer("abcabcabc", return_tensors="pt", return_token_type_ids=False)
    spec = Speculator.from_pretrained("prompt-lookup", target=model)
    out = model.generate(**inputs, custom_generate=spec, max_new_tokens=16)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=16))
