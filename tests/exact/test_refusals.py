"""The one table of refusals: what is called, which error of ours it ends in, and the name that the error says.

All is refused before any work, and whoever reads the error knows which of the things given is at fault. A new option is
a row of OPTIONS for each value that it does not take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    DynamicCache,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
)

import longdraft
from longdraft import LongdraftError, PromptCache, Request, Sampling, Speculator
from longdraft.errors import (
    ArgumentError,
    CapabilityError,
    CheckpointError,
    ContextError,
    MemoryBudgetError,
    PromptError,
    RequestError,
    UnknownMethodError,
    UnsupportedModelError,
)
from tests.support.drafts import random_draft, random_eagle3, random_heads, random_lm, save_model, small_lm
from tests.support.tiny import tiny_model, tiny_tokenizer

model = cache(lambda **sizes: tiny_model(**{"vocab": 11, **sizes}))


def refused(call: Callable[[], Any], error: type[Exception], name: str, what: object) -> None:
    """The call ends in an error of ours that says each word of ``name``."""
    try:
        call()
    except error as caught:
        assert isinstance(caught, LongdraftError), f"{what}: {caught!r}"
        assert all(word in str(caught) for word in name.split()), f"{what}: {caught} does not say {name}"
    else:
        pytest.fail(f"{what} is not refused")


@pytest.fixture(scope="module")
def spec():
    return Speculator("prompt-lookup", target=tiny_model(context=256), tokenizer=tiny_tokenizer(chat=True))


# --- prompts and settings ---

TURNS = [{"role": "user", "content": "Hi"}]
PROMPTS: list[tuple[Any, str]] = [
    ([], "prompt"), ([[]], "empty"), ("", "empty"), (123, "123"), (None, "None"), (b"abc", "b'abc'"), ([1, "a"], "0"),
    (["a", 3], "1"), ([[1.5, 2]], "1.5"), ([True], "True"), ([10**30], str(10**30)), ({"input_ids": [1]}, "input_ids"),
    (TURNS, "apply_chat_template"), ([TURNS], "apply_chat_template"), (Request(5), "5"), (Request(["a", "b"]), "'a'"),
    ([[99]], "99"), ([[-1]], "-1"),
]  # fmt: skip
SETTINGS: list[tuple[dict[str, Any], type[LongdraftError], str]] = [
    ({"sampling": 0.7}, RequestError, "longdraft.Sampling"),
    ({"sampling": Sampling(0.7), "temperature": 0.7}, RequestError, "temperature"),
    *(({name: value}, RequestError, name) for name, value in (
        ("temperature", "x"), ("temperature", -1), ("repetition_penalty", 0), ("max_new_tokens", "2"),
        ("max_new_tokens", True), ("max_new_tokens", 0), ("seed", "x"), ("seed", 2**70), ("stop", [""]), ("stop", ""),
        ("stop", 1), ("eos_token_ids", "a"), ("eos_token_ids", ["a"]), ("chat", "no"), ("batch", "2"), ("batch", 0),
        ("cache", True), ("cancelled", True), ("piece", 0), ("piece", "all"),
    )),
    ({"temperature": 0.5, "top_p": 2}, RequestError, "top_p"),
    ({"temperature": 0.5, "top_k": 1.5}, RequestError, "top_k"),
    ({"top_p": 0.9}, RequestError, "temperature"),
    ({"stop": [1]}, RequestError, "eos_token_ids"),
    ({"max_new_tokens": 10**6}, ContextError, "rope_factor"),
    # Arguments that there are not, and what was meant.
    ({"max_tokens": 4}, ArgumentError, "max_new_tokens"), ({"stop_strings": ["."]}, ArgumentError, "stop"),
    ({"do_sample": True}, ArgumentError, "temperature"), ({"num_beams": 2}, ArgumentError, "num_beams"),
    ({"eos_token_id": 2}, ArgumentError, "eos_token_ids"), ({"temprature": 2}, ArgumentError, "temperature"),
    ({"foo": 2}, ArgumentError, "max_new_tokens"),
    # And of another place.
    *(({name: ()}, ArgumentError, f"{name} {place}(") for place, names in (
        ("Request", ("processors", "tenant", "predicted", "reuse")),
        ("Speculator", ("plan", "offload", "kv_dtype", "tokenizer", "branches", "draft")),
    ) for name in names),
]  # fmt: skip
BAD_SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": -0.1}, {"top_p": 1.5},
    {"min_p": -0.1}, {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"repetition_penalty": -2.0}, {"temperature": None},
    *({"repetition_window": window, "repetition_penalty": 1.2} for window in (0, -5, 2.5, True)),
    {"repetition_window": 10},
]  # fmt: skip


def test_prompts_and_settings(spec, forwards):
    for prompt, name in PROMPTS:
        refused(lambda prompt=prompt: spec.generate(prompt), PromptError, name, prompt)
    for settings, error, name in SETTINGS:
        for call in (spec.generate, spec.stream):
            refused(lambda call=call, given=settings: call("one", **given), error, name, settings)
    for bad in BAD_SAMPLINGS:
        for temperature in (1.0, 0.0):
            given = {"temperature": temperature} | bad
            refused(lambda given=given: Sampling(**given), LongdraftError, next(iter(bad)).split("_")[0], given)
    for wrong in (lambda: spec.generate("one", max_tokens=4), lambda: Request("one", temperatur=1)):
        with pytest.raises(TypeError, match=r"temperatur|max_tokens"):
            wrong()
    session = spec.session(2)
    for bad, error in (
        (Request([]), PromptError), (Request([99]), PromptError), (5, PromptError), (Request([1], 0), RequestError),
        (Request([1], 10**6), ContextError),
    ):  # fmt: skip
        refused(lambda bad=bad: session.add(bad), error, "", bad)
    assert not session.busy and not forwards  # and nobody has waited for them


def test_memory_that_there_is_not(spec, forwards, free_memory):
    free_memory(1000)
    refused(lambda: spec.generate([[1] * 30], max_new_tokens=5), MemoryBudgetError, "", "1,000 bytes")
    assert not forwards


# --- options of methods ---

# The draft of a row is a name of DRAFTS.
DRAFTS = {
    "lm": lambda folder: small_lm(folder), "longspec": lambda folder: random_draft(folder, model()),
    "eagle3": lambda folder: random_eagle3(folder, model(layers=6)),
    "heads": lambda folder: random_heads(folder, model()),
    "eagle3 window": lambda folder: random_eagle3(folder, model(layers=6), window=512),
}  # fmt: skip
VIEW = {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4}
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("prompt-lookup", {"branches": "x"}, "branches"), ("prompt-lookup", {"branches": 0}, "branches"),
    ("prompt-lookup", {"branch": 2}, "branches"), ("prompt-lookup", {"breadth": 3}, "max_draft"),
    ("prompt-lookup", {"draft": "longspec"}, "draft"), ("suffix", {"earlier": 1}, "earlier"),
    ("suffix", {"earlier": 2.5}, "earlier"),
    *(("ar", {"plan": plan}, "") for plan in (5, "best", {2: 1.0}, {1: 1.0, 3: -1.0}, {})),
    ("ar", {"offload": 5}, "offload"), ("ar", {"kv_dtype": "fp8"}, "kv_dtype"),
    ("ar", {"deterministic": 1}, "deterministic"),
    ("longspec", {"widths": (0,)}, "widths"), ("longspec", {"draft": 5}, "draft"),
    ("longspec", {"draft": "longspec", "earlier": 500}, "lookup"),
    ("specextend", {"every": 4, "refresh": 3}, "every"), ("specextend", {"refresh": 3, "every": 4}, "every"),
    ("specextend-eagle3", {"draft": "eagle3 window", "window": 64}, "window"),
    ("specpv", {"budget": 100}, "block"), ("specpv", {"budget": 64}, "sink"), ("specpv", {"sink": 3}, "sink"),
    ("specpv", {"recent": 6}, "window"), ("specpv", {"drafter": "prompt-lookup", "widths": (2, 2)}, "widths"),
    ("specpv", {"draft": "longspec", "drafter": "eagle3"}, "longspec"),
    ("specpv", {"draft": "longspec", "drafter": "longspec", "chunks": 8}, "chunks"),
    # views of self-drafting
    ("self", {"draft": "lm"}, "draft"), ("self", {"tree": "chain", "top_k": 2}, "depth"),
    ("self", {"view": "some"}, "streaming"), ("self", {"budget": 40}, "chunk"),
    ("self", {"view": "snapkv", "budget": 40}, "budget"), ("self", {"view": "streaming", "budget": 8}, "budget"),
    ("self", {"view": "streaming", "budget": 20, "sink": 16, "window": 8}, "window"),
    ("self", {"view": "tokens", "budget": 16, "sink": 8, "window": 9}, "budget"),
    ("self", {"view": "chunks", "budget": 50}, "chunk"), ("self", {"view": "chunks", "sink": 12, "chunk": 8}, "sink"),
    ("self", {"view": "chunks", "chunk": 0}, "chunk"), ("self", {"view": "tokens", "chunk": 8}, "view=tokens"),
    ("self", {"view": "streaming", "chunk": 8}, "view=streaming"), ("self", {"view": "tokens", "sink": -1}, "sink"),
    ("self", {"view": "tokens", "window": 0}, "window"), ("self", {"view": "streaming", "budget": "512"}, "budget"),
    ("self", {"view": "snapkv", "budget": 512.0}, "budget"), ("self", {"view": "snapkv", "budget": True}, "budget"),
    # of small models, and of levels
    ("magicdec", {"budget": 8}, "budget"),
    ("magicdec", {"drafter": "small-lm"}, "drafter"), ("magicdec", {"draft": "lm"}, "draft"),
    ("triforce", {"draft": "lm", "budget": 40}, "sink"), ("triforce", {"draft": "lm", "streamed": 16}, "streamed"),
    ("triforce", {"draft": "lm", "view": "chunks"}, "view"),
    ("small-lm", {"draft": "lm", "view": "some"}, "view"), ("small-lm", {"draft": "lm", "chunk": 8}, "chunk"),
    ("small-lm", {"draft": "lm", "view": "streaming", "every": 2}, "retrieval"),
    ("small-lm", {"draft": "lm", "view": "streaming", "sink": 500}, "trained"),
    ("small-lm", {"draft": "lm", **VIEW, "sink": 6}, "sink"),
    ("small-lm", {"draft": "lm", **VIEW, "recent": 7}, "recent"),
    ("small-lm", {"draft": "lm", **VIEW, "chunks": 2}, "sink"),
    ("small-lm", {"draft": "lm", **VIEW, "recent": 256, "chunks": None}, "sink"),
    ("small-lm", {"draft": "lm", "view": "streaming", "sink": 4, "recent": 12, "depth": 500}, "depth"),
    # heads, and the views of their states
    ("tokenswift", {"draft": "heads", "heads": 4}, "3"), ("tokenswift", {"draft": "heads", "depth": 5}, "4"),
    ("tokenswift", {"draft": "heads", "view": "none", "widths": (3, 3, 3, 1)}, "levels"),
    ("tokenswift", {"draft": "heads", "view": "none", "heads": 1, "widths": (3, 3)}, "1"),
    ("tokenswift", {"draft": "heads", "depth": 2, "tree": "static"}, "widths"),
    ("tokenswift", {"draft": "heads", "budget": 40}, "budget"),
    ("tokenswift", {"draft": "heads", "view": "none", "budget": 64, "refresh": 4}, "refresh"),
    ("tokenswift", {"draft": "heads", "view": "all", "budget": 64}, "budget"),
]  # fmt: skip


def test_options(tmp_path):
    made = cache(lambda kind: DRAFTS[kind](tmp_path / kind))
    for method, options, name in OPTIONS:
        given = options | ({"draft": made(options["draft"])} if options.get("draft") in DRAFTS else {})
        sizes = {"layers": 6} if str(options.get("draft")).startswith("eagle3") else {}
        refused(lambda m=method, o=given, s=sizes: Speculator(m, target=model(**s), **o), RequestError, name,
                (method, options))  # fmt: skip
    settings = [("Request", ("processors", "tenant", "predicted"))]
    settings += [("generate", ("seed", "max_new_tokens", "temperature", "stop", "cache", "batch", "piece"))]
    for method, (place, names) in product((None, "prompt-lookup"), settings):
        for name in names:
            refused(lambda m=method, n=name: Speculator(m, **{n: 1}), ArgumentError, f"{name} {place}(", name)
    for options, name in (
        ({"branch": 2}, "branches"), ({"branches": 0}, "branches"), ({"branches": 2, "widths": (2, 2)}, "widths"),
        ({"reduction": "max"}, "reduction"), ({"temperature": 0.7}, "temperature"), ({"breadth": 2}, "breadth"),
    ):  # fmt: skip
        refused(lambda o=options: Speculator(**o), RequestError, name, options)


def gpt2(folder: Any) -> Any:
    """A model with a table of 40 positions."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 11, "n_positions": 40}
    return save_model(folder, GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)))


@pytest.mark.usefixtures("small_sizes")
def test_what_makes_no_speculator(tmp_path, shipped_in):
    shipped_in(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    lm, longspec, learned = (make(tmp_path / str(i)) for i, make in enumerate((small_lm, DRAFTS["longspec"], gpt2)))
    half, whole = model(dtype=torch.bfloat16), model()
    calls: list[tuple[Callable[[], Any], type[LongdraftError], str]] = [
        (lambda: Speculator(5), RequestError, "target"), (lambda: Speculator(""), UnknownMethodError, "''"),
        (lambda: Speculator("longspecs"), UnknownMethodError, "longspec"),
        (lambda: Speculator("lookahead"), UnknownMethodError, "lookahead"),
        (lambda: Speculator("ar").generate("one"), RequestError, "target"),
        (lambda: Speculator().method, RequestError, "target"),
        (lambda: Speculator("ar", target=whole).generate("text"), CapabilityError, "tokenizer"),
        (lambda: Speculator("ar").decode([1]), LongdraftError, ""),
        (lambda: Speculator("ar", target="gpt2"), UnsupportedModelError, "longdraft.load"),
        (lambda: Speculator("ar", tokenizer="gpt2"), RequestError, "AutoTokenizer"),
        (lambda: Speculator(str(tmp_path / "empty")), CheckpointError, "empty"),
        (lambda: Speculator(tmp_path / "nowhere"), CheckpointError, "nowhere"),
        (lambda: Speculator("longspec", draft=tmp_path / "nowhere"), CheckpointError, "nowhere"),
        (lambda: Speculator("longspec", target=whole), CapabilityError, "--draft"),
        (lambda: Speculator("tokenswift", target=whole), CapabilityError, "tokenswift"),
        (lambda: Speculator("triforce", target=whole, draft=longspec), CheckpointError, "longspec"),
        (lambda: Speculator("triforce", target=model(vocab=12), draft=lm), CheckpointError, ""),
        *((lambda m=m: Speculator(m, target=half, view_dtype="int8", **({} if m == "self" else {"drafter": "ar"}))
           .generate([[1] * 50], max_new_tokens=4), CapabilityError, "view_dtype") for m in ("self", "specpv")),
        (lambda: Speculator(learned, target=whole, widths=(2, 2)).generate([[4] * 10], max_new_tokens=31),
         CapabilityError, "40"),
        (lambda: Speculator("small-lm", target=whole, draft=learned, view="streaming", sink=1, recent=4, depth=2)
         .generate([[1, 2]], max_new_tokens=5), UnsupportedModelError, ""),
        (lambda: Speculator("small-lm", target=whole, draft=random_lm(tmp_path / "own", whole), vocabulary=5)
         .generate([[1, 2]]), CapabilityError, "vocabulary"),
        (lambda: longdraft.load(5), LongdraftError, ""),
        *((lambda k=k: longdraft.load(**{k: 5 if k in ("dtype", "device") else "x"}), LongdraftError, "")
          for k in ("dtype", "device", "rope_factor", "weights")),
        (lambda: PromptCache().save("x", "y"), LongdraftError, ""),
        (lambda: Speculator("ar", target=whole).session(context="2"), RequestError, "context"),
        (lambda: Speculator("ar", target=whole).session(0), RequestError, "batch"),
        # methods of one's own
        (lambda: longdraft.compose("mine", 5), LongdraftError, ""),
        (lambda: longdraft.compose(5, 5), LongdraftError, "5"),
        (lambda: longdraft.register(5), LongdraftError, "5"),
        *((lambda n=n, o=o: longdraft.compose(n, one_of_ours, **o), RequestError, name) for n, o, name in (
            ("longspec", {}, "longspec"), ("a:b", {}, "a:b"), ("", {}, "''"), ("mine", {"draft": "bert"}, "bert"),
            ("mine", {"draft": "eagle3"}, "eagle3"), ("mine", {"schedule": lambda n=3: None}, "n"))),
        (lambda: longdraft.compose("mine", lambda draft: one_of_ours()), RequestError, "draft"),
    ]  # fmt: skip
    for i, (call, error, name) in enumerate(calls):
        refused(call, error, name, f"call {i}")


def one_of_ours(n: int = 3) -> Any:
    return Speculator("prompt-lookup").recipe().drafter()


# --- transformers' generate ---

IDS = torch.tensor([[3, 9, 14, 7, 22, 5] * 6])


class Uncopied(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it holds a socket")


@torch.no_grad()
def used(processor: Any) -> Any:
    """A processor that has seen a step of another text."""
    processor(torch.tensor([[1, 2]]), torch.zeros(1, 61))
    return processor


def penalty_that_ignores(*lengths: int) -> Any:
    try:
        return RepetitionPenaltyLogitsProcessor(1.5, torch.tensor(lengths))
    except ValueError:  # this version of transformers ignores as many tokens of every row
        return EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.ones(len(lengths), 2, dtype=torch.long))


ALONE: list[tuple[Any, str]] = [
    ({"num_beams": 2}, "num_beams"), ({"num_beams": 2, "do_sample": True}, "num_beams"),
    ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.1}, "num_beam_groups"),
    ({"num_beams": 2, "force_words_ids": [[3]]}, "force_words_ids"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    ({"dola_layers": "low"}, "dola_layers"), ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    (lambda m: {"assistant_model": m}, "assistant_model"), ({"assistant_early_exit": 1}, "assistant_early_exit"),
    *(({"return_dict_in_generate": True, name: True}, name) for name in
      ("output_scores", "output_logits", "output_hidden_states")),
    (lambda m: {"past_key_values": DynamicCache(config=m.config)}, "cache"),
    ({"position_ids": torch.arange(5, 41)[None]}, "position_ids"),
    ({"logits_to_keep": torch.tensor([3])}, "logits_to_keep"),
    ({"synced_gpus": True}, "synced_gpus"),
    ({"logits_processor": LogitsProcessorList([ClassifierFreeGuidanceLogitsProcessor(1.5)])},
     "ClassifierFreeGuidanceLogitsProcessor"),
]  # fmt: skip
IN_A_BATCH: list[tuple[Any, str]] = [
    ({"logits_processor": [Uncopied()]}, "Uncopied"),
    (lambda m: {"logits_processor": [penalty_that_ignores(1, 2, 3)]}, "RepetitionPenalty"),
    (lambda m: {"logits_processor": [used(SynthIDTextWatermarkingConfig(2, [3]).construct_processor(61, "cpu"))]},
     "batch"),
    ({"stopping_criteria": [EosTokenCriteria(7)]}, "pad_token_id"),
]  # fmt: skip


def test_what_generate_asks_for(forwards):
    target = tiny_model()
    for rows, table in ((1, ALONE), (2, IN_A_BATCH)):
        for settings, name in table:
            given = settings(target) if callable(settings) else settings
            refused(
                lambda rows=rows, given=given: target.generate(
                    IDS.repeat(rows, 1), max_new_tokens=5, custom_generate=Speculator("ar"), **given
                ),
                CapabilityError, name, given,
            )  # fmt: skip
    for ids in (torch.tensor([[3, -1, 4]]), torch.tensor([[3, 61]]), torch.empty(0, 4, dtype=torch.long)):
        refused(
            lambda ids=ids: target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, custom_generate=Speculator("ar")
            ),
            PromptError, "", ids,
        )  # fmt: skip
    assert not forwards
