"""A text ends at every token that the model's files, or its vocabulary, call an end; and at a stop that is a token."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import longdraft
from longdraft import Request, Speculator
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_model

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
PROMPT = [0, 1, 2, 3, 0, 1, 2, 3, 0]
# What follows PROMPT: lookup drafts b, c, d, of which it rejects d; then the first token behind the words.
TEXT = [1, 2, 0, 1, 2, 11, 3, 3]
MODEL = tiny_model(vocab=20)


class Says:
    """A logits processor that allows nothing but the tokens of a text."""

    def __init__(self, text: list[int], prompt: int = len(PROMPT)) -> None:
        self.text, self.prompt = text, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -1e9)
        forced[:, self.text[(ids.shape[1] - self.prompt) % len(self.text)]] = 0.0
        return forced


def vocabulary(*names: str, special: bool = True, **roles: str) -> PreTrainedTokenizerFast:
    """Ten words, and tokens of these names behind them."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **roles)


def said(tokenizer, *, model=MODEL, prompt=PROMPT, text=TEXT, **settings):
    """The result of a text's beginning; with drafts as without, streamed as whole."""
    results = []
    for method, options in (("ar", {}), ("prompt-lookup", {"min_n": 1, "plan": "fixed"})):
        spec = Speculator(method, target=model, tokenizer=tokenizer, **options)
        request = Request(prompt, max_new_tokens=len(text), processors=[Says(text, len(prompt))], **settings)
        stream = spec.stream(request)
        streamed = "".join(step.text for step in stream)
        results += stream.results()
        assert streamed == results[-1].text
    plain, drafted = results
    assert (plain.token_ids, plain.text, plain.finish_reason) == (
        drafted.token_ids, drafted.text, drafted.finish_reason,
    )  # fmt: skip
    assert prompt is not PROMPT or text is not TEXT or 0 < drafted.accepted < drafted.drafted
    return drafted


ENDS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>",
    "<|end_of_text|>", "<|return|>", "<|call|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<turn|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>",
)  # fmt: skip


def test_known_ends_of_a_vocabulary_end_a_text_and_other_special_tokens_do_not():
    for i, name in enumerate(ENDS):
        result = said(vocabulary(name, special=i % 2 > 0))
        assert (result.finish_reason, result.token_ids, result.text) == ("eos", TEXT[:6], "bcabc"), name
    for name in ("<|im_start|>", "<tool_call>", "<|channel|>", "<|fim_prefix|>"):
        assert said(vocabulary(name)).token_ids == TEXT
    for name in ("</s>", "<eos>"):  # they may be words where they are not special
        assert said(vocabulary(name)).finish_reason == "eos"
        assert said(vocabulary(name, special=False)).token_ids == TEXT
    # The end of a part of a message is none where messages have ends.
    assert said(vocabulary("<|end|>", "<|return|>", "<|call|>")).token_ids == TEXT
    assert said(vocabulary("<|return|>", "<|call|>", "<|end|>")).token_ids == TEXT[:6]
    result = said(vocabulary("<|im_end|>"), eos_token_ids=[])
    assert result.token_ids == TEXT and result.finish_reason == "length"
    model = tiny_model(vocab=20)
    model.generation_config.eos_token_id = [7, 11]
    assert said(vocabulary("<tool_call>"), model=model).token_ids == TEXT[:6]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("stop", ["<tool_call>", ["x", "<tool_call>"], "c<tool_call>", "<tool_call>d"])
def test_a_stop_that_is_or_has_a_special_token_ends_the_text(stop, special):
    result = said(vocabulary("<tool_call>", special=special), stop=stop)
    more = stop == "<tool_call>d"
    assert result.finish_reason == "stop" and result.token_ids == TEXT[: 6 + more]
    assert "tool" not in result.text and result.text.startswith("bcab")


def test_a_stop_is_named_as_the_reason_where_it_is_an_end_too():
    assert said(vocabulary("<|im_end|>"), stop="<|im_end|>").finish_reason == "stop"
    result = said(vocabulary("<|im_end|>"), stop="<|im_end|>", eos_token_ids=[])
    assert result.finish_reason == "stop" and result.text == "bcabc"


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_ends_that_a_file_states_end_a_text(key, tmp_path):
    """Their names say nothing: 62 is a word like any other of the vocabulary."""
    write_gguf(tmp_path / "a.gguf", numbers={f"tokenizer.ggml.{key}_token_id": 62})
    model, tokenizer = longdraft.load(tmp_path / "a.gguf", device="cpu")
    text = [4, 5, 62, 6]
    assert said(tokenizer, model=model, prompt=[4, 5, 4], text=text).token_ids == text[:3]
    ids = torch.tensor([[4, 5, 4]])
    own = model.generate(ids, max_new_tokens=4, do_sample=False, logits_processor=[Says(text, 3)])
    assert own[0, 3:].tolist() == text[:3]  # the model's own generate ends there too
    assert said(tokenizer, model=model, prompt=[4, 5, 4], text=[4, 5, 0, 6]).token_ids == [4, 5, 0]  # <|endoftext|>


def test_a_second_file_without_a_template_is_named_too(tmp_path, caplog):
    for name in ("first.gguf", "second.gguf"):
        write_gguf(tmp_path / name)
        model, tokenizer = longdraft.load(tmp_path / name, device="cpu")
        Speculator("ar", target=model, tokenizer=tokenizer).encode("the")
        Speculator("ar", target=model, tokenizer=tokenizer).encode("the")
    assert [caplog.text.count(f"{name}.gguf comes without") for name in ("first", "second")] == [1, 1]
    shutil.copytree(tmp_path, tmp_path / "copies" / tmp_path.name)
    model, tokenizer = longdraft.load(tmp_path / "copies" / tmp_path.name / "first.gguf", device="cpu")
    Speculator("ar", target=model, tokenizer=tokenizer).encode("the")
    assert caplog.text.count("first.gguf comes without") == 2  # another file of the same name


def byte_fallback() -> PreTrainedTokenizerFast:
    """Every byte is a token, as in vocabularies of SentencePiece: a run of bytes is decoded together."""
    inner = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("text", ["\u20ac\U0001f600", "a\u20ac\u20ac", "\U0001f600" * 3])
def test_a_budget_that_ends_inside_a_character_streams_what_it_returns(text):
    model, tokens = tiny_model(vocab=256), list(text.encode())
    for budget in range(1, len(tokens) + 1):
        result = said(byte_fallback(), model=model, prompt=[97, 97, 97], text=tokens[:budget])
        readable = bytes(tokens[:budget]).decode(errors="ignore")
        assert result.text.startswith(readable) and set(result.text[len(readable) :]) <= {"\ufffd"}


def test_served_texts_end_there_too_and_ignore_eos_decodes_on():
    pytest.importorskip("fastapi")
    from tests.serve.bytes import byte_tokenizer
    from tests.serve.conftest import Running, make_service

    tokenizer = byte_tokenizer()
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>", "<call>"]
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    end, call, tool = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<call>", "<tool>"])
    with contextlib.closing(Running(make_service(tiny_model(vocab=280), tokenizer, context=500))) as running:
        ask = running.client().completions.create
        usual = {"model": "tiny", "prompt": "def", "max_tokens": 8, "temperature": 0}
        for token, more, reason in (
            (end, {}, "stop"),
            (end, {"suffix": "x"}, "stop"),
            (end, {"extra_body": {"ignore_eos": True}}, "length"),
            (call, {}, "length"),
            (call, {"stop": "<call>"}, "stop"),
            (tool, {"stop": "<tool>"}, "stop"),
            (tool, {"stop": ["<tool>"], "extra_body": {"ignore_eos": True}}, "stop"),
        ):
            choice = ask(**usual, **more, logit_bias={str(token): 100}).choices[0]
            assert choice.finish_reason == reason, (token, more)
            assert choice.text == ("<call>" * 8 if token == call and reason == "length" else ""), (token, more)
