"""Judges a model type: its tiny model is hosted and writes what its own ``generate`` writes, or is refused."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from longdraft import Speculator, compose
from longdraft.errors import UnsupportedModelError
from longdraft.model.layout import layer_type_names
from tests.support.tiny import generate_tokens
from tests.zoo.planted import Planted
from tests.zoo.tiny_models import VOCABULARY, WINDOW, tiny_model

NEW = 16
# Longer than any window; about as long as one; shorter.
LENGTHS = (5 * WINDOW, WINDOW + 3, 3)
# Two best logits closer than this, relative to the largest, may be taken for one another.
NEAR = 1e-4
# Relative noise in the embeddings that stands for rounding: where it changes the token, a router was undecided.
NOISE = 1e-5
# Of 32 forwards with noise. A router that is undecided goes either way about as often.
SEVERAL = 4
# The names under which configurations say that a token goes to some of many experts.
ROUTED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    kinds: its kinds of layers; see :func:`longdraft.model.layout.layer_type_names`.
    reason: why it is refused; empty if it is hosted.
    """

    kinds: tuple[str, ...]
    reason: str = ""

    @property
    def hosted(self) -> bool:
        return not self.reason


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCABULARY - 5, (n,), generator=generator).tolist() for n in LENGTHS]


def judge(model_type: str) -> Verdict:
    """Hosts the tiny model of a type, and compares its texts.

    Raises:
        AssertionError: it is hosted, and writes something else.
    """
    model = tiny_model(model_type)
    texts = prompts()
    try:
        plain = Speculator("ar", target=model)
        plain_tokens = plain.generate(texts[:1], max_new_tokens=NEW, eos_token_ids=[])[0].token_ids
    except UnsupportedModelError as error:
        return Verdict(layer_type_names(model), short_reason(error))
    expected = [generate_tokens(model, text, NEW) for text in texts]
    assert len(set(expected[0])) > 3, "a text that hardly changes tests little: take another seed"
    same(model, texts[0], expected[0], plain_tokens, "plain decoding")

    method = compose(
        "planted", lambda: Planted({tuple(t): o for t, o in zip(texts, expected, strict=True)}, VOCABULARY)
    )
    planted = Speculator(method, target=model, plan="fixed")
    lookup = Speculator("prompt-lookup", target=model, plan="fixed", min_n=1, branches=3)
    for spec, how in ((planted, "trees"), (lookup, "lookups")):
        batch = spec.generate(texts, max_new_tokens=NEW, eos_token_ids=[])
        for text, wanted, result in zip(texts, expected, batch, strict=True):
            same(model, text, wanted, result.token_ids, f"{how}, in a batch of three")
    for text, wanted in zip(texts, expected, strict=True):
        (alone,) = planted.generate([text], max_new_tokens=NEW, eos_token_ids=[])
        same(model, text, wanted, alone.token_ids, "trees, alone")
        assert alone.token_ids != wanted or 0 < alone.accepted < alone.drafted, (
            "nothing was accepted, or nothing rejected"
        )
    text, wanted = texts[1], expected[1]
    same(model, text, wanted, generate_tokens(model, text, NEW, custom_generate=planted), "trees, through generate")
    return Verdict(layer_type_names(model))


def same(model: PreTrainedModel, prompt: list[int], wanted: list[int], got: list[int], how: str) -> None:
    """Compares two texts up to their first near tie, of which it warns."""
    if got == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), len(got))
    assert at < len(got), f"{how}: {got} ends before {wanted}"
    tie = near_tie(model, prompt + wanted[:at], got[at])
    assert tie, f"{how}: token {at} of {got} is not the one of {wanted}, and no near tie"
    warnings.warn(f"a near tie of {tie} at token {at}: {how}", stacklevel=2)


def near_tie(model: PreTrainedModel, text: list[int], other: int) -> str:
    """Says between what a model can hardly decide, so that it may as well write ``other``: tokens, or experts.

    Experts: there are routers, and under noise of the size of rounding several of the model's own forwards write it.
    """

    def own(noise: float) -> torch.Tensor:
        def shake(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            return output * (1 + noise * torch.randn(output.shape, generator=generator))

        hook = model.get_input_embeddings().register_forward_hook(shake)
        try:
            with torch.inference_mode():
                return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        finally:
            hook.remove()

    generator = torch.Generator().manual_seed(0)
    logits = own(0.0)
    if logits.max() - logits[other] < NEAR * logits.abs().max():
        return "tokens"
    routed = any(hasattr(model.config.get_text_config(), name) for name in ROUTED)
    return "experts" if routed and sum(int(own(NOISE).argmax()) == other for _ in range(32)) >= SEVERAL else ""


def short_reason(error: Exception) -> str:
    """The first sentence of a refusal, without the name of the class and what follows from it."""
    text = str(error).split(". ")[0].split("; ")[0].rstrip(".")
    text = text.split(", so longdraft")[0].split(", which longdraft")[0]
    return text.partition(" ")[2]
