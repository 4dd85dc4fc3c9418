"""Models that read images too: their text is hosted like a language model's, and prompts with images are refused."""

from __future__ import annotations

import pytest
import torch

import longdraft
from longdraft import Speculator
from longdraft.errors import CapabilityError, UnsupportedModelError
from tests.support.slow_marks import slow
from tests.support.tiny import generate_tokens, tiny_tokenizer
from tests.zoo.judging import NEW, prompts, same
from tests.zoo.tiny_models import tiny_image_model


@pytest.mark.parametrize(
    "model_type", ["gemma3", "qwen2_5_vl", "qwen3_5", "llava", *map(slow, ("mistral3", "qwen2_vl", "qwen3_vl"))]
)
def test_a_text_is_what_the_models_own_generate_writes(model_type):
    model = tiny_image_model(model_type)
    spec = Speculator("prompt-lookup", target=model, plan="fixed", min_n=1, branches=3)
    results = spec.generate(prompts(), max_new_tokens=NEW, eos_token_ids=[])
    for prompt, result in zip(prompts(), results, strict=True):
        same(model, prompt, generate_tokens(model, prompt, NEW), result.token_ids, "lookups, in a batch of three")


def test_a_model_whose_prompts_see_what_follows_is_refused():
    with pytest.raises(UnsupportedModelError, match="a mask of its own"):
        Speculator("ar", target=tiny_image_model("paligemma"))


def test_a_folder_that_no_language_model_is_registered_for(tmp_path):
    model = tiny_image_model("qwen3_vl")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = longdraft.load(tmp_path)
    assert type(loaded.model) is type(model)
    (result,) = Speculator("ar", target=loaded.model).generate(prompts()[:1], max_new_tokens=8, eos_token_ids=[])
    assert result.token_ids == generate_tokens(model, prompts()[0], 8)


def test_a_prompt_with_an_image_is_refused_by_name():
    model = tiny_image_model("llava")
    spec = Speculator("ar", target=model)
    ids, size = torch.tensor([[5, 6, model.config.image_token_id]]), model.config.vision_config.image_size
    with pytest.raises(CapabilityError, match="reads text alone"):
        model.generate(ids, pixel_values=torch.zeros(1, 3, size, size), custom_generate=spec, max_new_tokens=4)


def test_a_prompt_of_text_from_a_processor_is_decoded():
    """Processors say of each token whether it belongs to an image."""
    model = tiny_image_model("gemma3")
    ids = torch.tensor([[5, 6, 7, 8]])
    more = {"token_type_ids": torch.zeros_like(ids), "max_new_tokens": 8, "do_sample": False}
    own = model.generate(ids, attention_mask=torch.ones_like(ids), **more)
    ours = model.generate(ids, custom_generate=Speculator("prompt-lookup", target=model, plan="fixed"), **more)
    assert torch.equal(own, ours)
    with pytest.raises(CapabilityError, match="token_type_ids"):
        model.generate(ids, custom_generate=Speculator("ar", target=model), token_type_ids=torch.ones_like(ids))
