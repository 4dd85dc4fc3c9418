"""Errors that say what to do, and what plain transformers takes: empty templates, folders without a tokenizer, new
kinds of blocks, grammars for a batch, python -OO, reloaded modules."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import longdraft
from longdraft import Request, Speculator
from longdraft.errors import CapabilityError, CheckpointError, PromptError
from tests.support.gguf_files import write_gguf
from tests.support.methods import METHODS, VOCABULARY, target
from tests.support.tiny import tiny_model, tiny_tokenizer

IDS = torch.tensor([[3, 9, 14, 7, 22, 5] * 6])
TWO = torch.cat([IDS, IDS.flip(1)])


def test_a_template_that_renders_nothing() -> None:
    for template in ("{% if false %}x{% endif %}", "{# nothing #}", "{{ '' }}\n"):
        tokenizer = tiny_tokenizer(chat=True)
        tokenizer.chat_template = template
        spec = Speculator("ar", target=tiny_model(), tokenizer=tokenizer)
        with pytest.raises(PromptError, match=r"template.*nothing"):
            spec.generate("Hello", max_new_tokens=4)
        assert spec.generate("Hello", max_new_tokens=4, chat=False)[0].token_ids


@pytest.mark.parametrize("beside", [None, "tokenizer_config.json", "special_tokens_map.json"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, beside: str | None) -> None:
    tiny_model().save_pretrained(tmp_path)
    if beside is not None:
        (tmp_path / beside).write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        longdraft.load(tmp_path)


@pytest.mark.parametrize(("kind", "word"), [(41, "Q1_0"), (9, "Q8_1"), (42, "Q2_0"), (97, "97")])
def test_blocks_that_are_not_unpacked_are_named(tmp_path: Path, kind: int, word: str) -> None:
    write_gguf(path := tmp_path / "a.gguf")
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    content[place : place + 4] = kind.to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"(?s)a\.gguf.*type.*{word}") as raised:
        longdraft.load(path)
    assert "truncated" not in str(raised.value)


# --- a grammar for a batch, of the shape of xgrammar's ---


class Compiled:
    """Allows token t behind a text of n tokens if (t - n) is a multiple of ``step``; like a C++ object, not copied."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle 'CompiledGrammar' object")


class Matcher(Compiled):
    at = 0


class OfABatch(LogitsProcessor):
    def __init__(self, grammars: Compiled | list[Compiled]) -> None:
        self.compiled_grammars = grammars if isinstance(grammars, list) else [grammars]
        self.matchers: list[Matcher] = []
        self.call_fn = self.stateful

    def stateful(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.matchers:
            each = self.compiled_grammars * (input_ids.shape[0] if len(self.compiled_grammars) == 1 else 1)
            self.matchers = [Matcher(grammar.step) for grammar in each]
        else:
            for row, matcher in zip(input_ids, self.matchers, strict=True):
                assert (int(row[-1]) - matcher.at) % matcher.step == 0
                matcher.at += 1
        scores, tokens = scores.clone(), torch.arange(scores.shape[1])
        for row, matcher in zip(scores, self.matchers, strict=True):
            row[(tokens - matcher.at) % matcher.step != 0] = -torch.inf
        return scores

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.call_fn(input_ids, scores)


@pytest.mark.parametrize("steps", [(3,), (3, 4)])
@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_a_grammar_for_a_batch(method: str | None, steps: tuple[int, ...]) -> None:
    model = tiny_model()
    spec = Speculator(method, target=model)
    known = {"attention_mask": torch.ones_like(TWO), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

    def made() -> list[Any]:
        return [OfABatch([Compiled(step) for step in steps])]

    expected = model.generate(TWO, **known, logits_processor=made())
    assert torch.equal(model.generate(TWO, **known, logits_processor=made(), custom_generate=spec), expected)
    alone = spec.generate([Request(TWO[0].tolist(), 24, processors=[OfABatch(Compiled(steps[0]))])])[0]
    assert alone.token_ids == expected[0, TWO.shape[1] :].tolist()
    with pytest.raises(CapabilityError, match="OfABatch"):  # for another batch
        grammars = [OfABatch([Compiled(2), Compiled(3), Compiled(4)])]
        model.generate(TWO, **known, logits_processor=grammars, custom_generate=spec)


# --- grammars of the shapes of outlines', by xgrammar and llguidance: neither grammars, matchers nor modules are copied


class CompiledGrammar(Compiled):
    pass


class LLTokenizer(Compiled):
    pass


class LLMatcher(Matcher):
    def deep_copy(self) -> LLMatcher:
        copied = LLMatcher(self.step)
        copied.at = self.at
        return copied


class GrammarMatcher(Matcher):
    def fork(self) -> GrammarMatcher:
        copied = GrammarMatcher(self.step)
        copied.at = self.at
        return copied


class Adapter:
    def __init__(self) -> None:
        self.torch = torch


class OfOutlines(LogitsProcessor):
    """Makes a matcher a row at the first token."""

    matcher_class: type[Matcher]

    def __init__(self) -> None:
        self.tensor_adapter, self.is_first_token = Adapter(), True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.is_first_token:
            self.matchers_of_rows: list[Any] = [self.matcher_class(3) for _ in input_ids]
            self.mask = self._mask
        else:
            for row, matcher in zip(input_ids, self.matchers_of_rows, strict=True):
                assert (int(row[-1]) - matcher.at) % matcher.step == 0
                matcher.at += 1
        self.is_first_token = False
        return self.mask(scores)

    def _mask(self, scores: torch.Tensor) -> torch.Tensor:
        tokens = self.tensor_adapter.torch.arange(scores.shape[1])
        for row, matcher in zip(scores, self.matchers_of_rows, strict=True):
            row[(tokens - matcher.at) % matcher.step != 0] = -torch.inf
        return scores


class ByXGrammar(OfOutlines):
    matcher_class = GrammarMatcher

    def __init__(self) -> None:
        super().__init__()
        self.xgr, self.compiled_grammar = importlib, CompiledGrammar(3)


class ByLLGuidance(OfOutlines):
    matcher_class = LLMatcher

    def __init__(self) -> None:
        super().__init__()
        self.grammar, self.llg_tokenizer = "three", LLTokenizer(3)


@pytest.mark.parametrize("processor", [ByXGrammar, ByLLGuidance])
@pytest.mark.parametrize("method", ["ar", "prompt-lookup"])
def test_a_grammar_that_holds_what_cannot_be_copied(method: str, processor: type[OfOutlines]) -> None:
    model, made = tiny_model(), processor()
    spec = Speculator(method, target=model)
    known = {"attention_mask": torch.ones_like(TWO), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(TWO, **known, logits_processor=[processor()])
    for _ in range(2):  # the rows have copies, so it serves again
        assert torch.equal(model.generate(TWO, **known, logits_processor=[made], custom_generate=spec), expected)
    requests = [Request(row.tolist(), 24, processors=[processor()]) for row in TWO]
    results = spec.generate(requests)
    assert [result.token_ids for result in results] == expected[:, TWO.shape[1] :].tolist()
    assert method == "ar" or sum(result.drafted for result in results) > sum(result.accepted for result in results) > 0
    made(TWO, torch.zeros(2, 61))
    with pytest.raises(CapabilityError, match=rf"{processor.__name__}.*Request\(processors="):  # is in a text
        model.generate(TWO, **known, logits_processor=[made], custom_generate=spec)


@pytest.mark.parametrize("processor", [ByXGrammar, ByLLGuidance])
def test_a_method_that_samples_ahead_copies_matchers_with_their_state(
    spec_factory: Any, processor: type[OfOutlines]
) -> None:
    model = target()
    prompt = [token % VOCABULARY for token in IDS[0].tolist()]
    plain, drafted = (
        spec.generate([Request(prompt, 24, processors=[processor()])])[0]
        for spec in (Speculator("ar", target=model), spec_factory.spec(METHODS["triforce"], model))
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.drafted >= drafted.accepted > 0  # with all KV in view, its drafts are the target's tokens


def test_processors_of_all_prompts_have_their_place() -> None:
    with pytest.raises(longdraft.errors.ArgumentError, match=r"Request\(prompt, processors="):
        Speculator(target=tiny_model()).generate(IDS.tolist(), processors=[ByXGrammar()])  # type: ignore[call-arg]


# --- python -OO, %autoreload ---

RUN = """
import longdraft
from longdraft import Speculator
assert Speculator.__doc__ is None
model, tokenizer = longdraft.load()
for name in ("prompt-lookup", None, "longspec"):
    assert Speculator(name, target=model, tokenizer=tokenizer).generate("Hello", max_new_tokens=4)[0].token_ids
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [["-c", RUN], ["-m", "longdraft", "methods"], ["-m", "longdraft", "generate", "-p", "hi", "-n", "2"]]
)
def test_python_without_docstrings(what: list[str]) -> None:
    subprocess.run([sys.executable, "-OO", *what], check=True, capture_output=True)


def test_a_reloaded_module() -> None:
    """As %autoreload 2 takes a class apart: it reads every attribute, and puts the new ones into the old class."""
    module = importlib.import_module("longdraft.speculator")
    before = dict(vars(module))
    old: Any = module.Speculator
    assert list(inspect.signature(old).parameters)[:3] == ["method", "target", "tokenizer"]
    try:
        new: Any = importlib.reload(module).Speculator
        for name in vars(old):
            getattr(old, name), getattr(new, name)
        model = tiny_model()
        known = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        taken = type("Speculator", (old,), {"__signature__": new.__signature__})
        for kind in (old, new, taken):
            spec = kind("prompt-lookup", target=model)
            assert torch.equal(model.generate(IDS, **known, custom_generate=spec), model.generate(IDS, **known))
            assert "generate_args" in inspect.signature(spec).parameters
    finally:
        vars(module).update(before)
