"""``longdraft generate`` from the command line to what it prints."""

from __future__ import annotations

import json
import signal

import pytest

from longdraft import Speculator
from longdraft.cli import generate as verb
from longdraft.engine.streaming import TextStream
from longdraft.errors import NumericalError

KEYS = [
    "text", "token_ids", "prompt_tokens", "new_tokens", "method", "exact", "finish_reason", "prefill_seconds",
    "decode_seconds", "tokens_per_second", "mean_accepted_length", "rounds", "peak_memory_bytes", "arithmetic",
]  # fmt: skip


def last_line(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_stdout_is_the_text_and_stderr_the_figures(generate):
    text = last_line(generate("-p", "hello", "-n", 12, "--json").out)["text"]
    ended = generate("-p", "hello", "-n", 12)
    assert ended.code == 0
    assert ended.out == text + "\n"
    assert "\x1b" not in ended.out + ended.err
    for figure in ("prompt-lookup, exact", "prompt ", "12 tokens in", "tokens/s", "at peak", "mean accepted length: "):
        assert figure in ended.err
    (kernels,) = (line for line in ended.err.splitlines() if line.startswith("kernels "))
    assert "longdraft's own" in kernels


def test_the_json_object_has_the_keys_of_the_contract(generate):
    ended = generate("-p", "hello", "-n", 12, "--json")
    assert len(ended.out.splitlines()) == 1  # the text is in the object only
    found = last_line(ended.out)
    assert list(found) == KEYS
    assert found["new_tokens"] == len(found["token_ids"]) == 12
    assert (found["method"], found["exact"], found["finish_reason"]) == ("prompt-lookup", True, "length")
    assert found["mean_accepted_length"] == pytest.approx(11 / found["rounds"])
    assert found["tokens_per_second"] == pytest.approx(12 / found["decode_seconds"])


def test_compare_with_ar(generate):
    ended = generate("-p", "hello hello hello hello", "-n", 40, "--compare", "--json")
    found = last_line(ended.out)
    assert list(found) == [*KEYS, "compare"]
    compare = found["compare"]
    assert list(compare) == ["ar", "speedup_vs_ar", "tokens_agree", "near_tie"]
    assert list(compare["ar"]) == KEYS
    assert compare["ar"]["method"] == "ar"
    assert compare["ar"]["mean_accepted_length"] == 1.0
    assert compare["tokens_agree"] is True
    assert compare["near_tie"] is None
    assert compare["ar"]["token_ids"] == found["token_ids"]
    speedup = found["tokens_per_second"] / compare["ar"]["tokens_per_second"]
    assert compare["speedup_vs_ar"] == pytest.approx(speedup)
    assert "all 40 tokens agree with ar" in ended.err
    assert "one run each" in ended.err


def test_compare_agrees_when_sampling_too_and_says_the_seed(generate):
    ended = generate("-p", "hello", "-n", 30, "--compare", "--json", "-t", 0.9, "--top-p", 0.95)
    assert "--seed" in ended.err
    assert last_line(ended.out)["compare"]["tokens_agree"] is True


def test_a_seed_gives_the_same_text(generate):
    texts = [generate("-p", "hello", "-n", 20, "-t", 1, "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_methods_and_their_options(generate):
    found = [
        last_line(generate("-p", "hello", "-n", 20, "--json", *more).out)["token_ids"]
        for more in (["--method", "ar"], ["-o", "branches=2", "-o", "max-nodes=20"])
    ]
    assert found[0] == found[1]


def test_a_document_and_its_instruction(generate, tmp_path):
    (tmp_path / "a.txt").write_text("the document")
    both = last_line(generate("-f", tmp_path / "a.txt", "-p", "why?", "-n", 1, "--json").out)
    joined = last_line(generate("-p", "the document\n\nwhy?", "-n", 1, "--json").out)
    assert both["prompt_tokens"] == joined["prompt_tokens"]
    assert both["token_ids"] == joined["token_ids"]


def test_standard_input_is_a_prompt(generate):
    assert generate("-n", 8, stdin=b"hello").out == generate("-p", "hello", "-n", 8).out


def test_raw_has_no_chat_template(generate):
    chat, raw = (last_line(generate("-p", "hello", "-n", 1, "--json", *more).out) for more in ([], ["--raw"]))
    assert raw["prompt_tokens"] == len("hello") < chat["prompt_tokens"]


def test_a_stop_string_is_not_printed(generate):
    whole = last_line(generate("-p", "hello", "-n", 30, "--json").out)["text"]
    stop = whole[4:7]
    ended = generate("-p", "hello", "-n", 30, "--stop", stop)
    assert ended.out.rstrip("\n") == whole[: whole.index(stop)]
    assert "stop string" in ended.err
    found = last_line(generate("-p", "hello", "-n", 30, "--stop", stop, "--json").out)
    assert (found["finish_reason"], found["text"]) == ("stop", whole[: whole.index(stop)])


def read(forwards) -> list[int]:
    """Tokens of each forward that read a prompt since this was asked last."""
    pieces = [f.rows for f in forwards if f.logits != "all"]
    forwards.clear()
    return pieces


def test_the_second_run_with_a_kv_cache_reads_one_token(generate, tmp_path, forwards):
    file = tmp_path / "new folder" / "prompt.kv"
    arguments = ("-p", "hello " * 20, "-n", 10, "--kv-cache", file)
    first = generate(*arguments)
    prompt_tokens = sum(read(forwards))
    assert prompt_tokens > 100
    assert f"kept {prompt_tokens} prompt tokens" in first.err
    second = generate(*arguments)
    assert read(forwards) == [1]
    assert second.out == first.out
    assert f"{prompt_tokens - 1} of {prompt_tokens} prompt tokens were there" in second.err
    other = generate("-p", "hello " * 19 + "world?", "-n", 10, "--kv-cache", file)
    assert other.code == 0
    assert 1 < sum(read(forwards)) < 20


def test_compare_reads_the_prompt_once(generate, forwards):
    generate("-p", "hello " * 20, "-n", 5, "--compare")
    first, second = read(forwards)
    assert first > 1 == second


def test_ctrl_c_prints_what_there_is(generate, press_ctrl_c):
    handler = signal.getsignal(signal.SIGINT)
    whole = generate("-p", "hello", "-n", 100, "--method", "ar").out
    press_ctrl_c(TextStream, "push", 10)
    ended = generate("-p", "hello", "-n", 100, "--method", "ar", "--compare")
    assert ended.code == 130
    assert 0 < len(ended.out) < len(whole)
    assert whole.startswith(ended.out.rstrip("\n"))
    assert ended.out.endswith("\n")
    assert "Cancelled." in ended.err
    assert "10 tokens in" in ended.err
    assert "compared" not in ended.err
    assert "Traceback" not in ended.err
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_while_the_prompt_is_read(generate, press_ctrl_c, tmp_path):
    press_ctrl_c(Speculator, "stream")
    ended = generate("-p", "hello", "-n", 10, "--kv-cache", tmp_path / "a.kv")
    assert ended.code == 130
    assert ended.out == ""
    assert "cancelled while" in ended.err
    assert not (tmp_path / "a.kv").exists()


def test_a_second_ctrl_c_aborts(generate, press_ctrl_c):
    press_ctrl_c(TextStream, "push", 10, times=2)
    ended = generate("-p", "hello", "-n", 100, "--method", "ar")
    assert ended.code == 130
    assert ended.out.endswith("\n")
    assert "Aborted." in ended.err
    assert "Traceback" not in ended.err


def test_a_difference_is_shown_for_what_it_is(generate, monkeypatch):
    stream = verb.Run.stream

    def wrong(self, spec, output):
        result = stream(self, spec, output)
        result.token_ids[3] = (result.token_ids[3] + 1) % 61
        return result

    monkeypatch.setattr(verb.Run, "stream", wrong)
    ended = generate("-p", "hello", "-n", 10, "--compare", "--json")
    compare = last_line(ended.out)["compare"]
    assert (compare["tokens_agree"], compare["near_tie"]) == (False, False)
    assert "first differ at new token 4" in ended.err
    assert "no near tie" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "The prompt is empty"),
        (["-p", "x", "-f", "no such file"], "no such file"),
        (["-p", "x", "--method", "magic"], "There is no method 'magic'"),
        (["-p", "x", "-o", "magic=1"], "no option magic: no method has one"),
        (["-p", "x", "-o", "magic"], "takes name=value"),
        (["-p", "x", "-n", "1000"], "the model's context holds 512"),
        (["-p", "x", "--seed", "-1"], "--seed must be"),
        (["-p", "x", "--weights", "stored", "--dtype", "bfloat16"], "Stored weights are for float32"),
        (["-p", "x", "--device", "abacus"], "abacus"),
    ],
)
def test_bad_settings_end_with_one_red_line_and_code_2(generate, arguments, message):
    ended = generate(*arguments)
    assert ended.code == 2
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("option", "value"), [("--max-tokens", "many"), ("--weights", "int4"), ("--top-p", "2"), ("--min-p", "-1")]
)
def test_a_value_out_of_range_names_its_option(generate, option, value):
    ended = generate("-p", "x", option, value)
    assert ended.code == 2
    assert option in ended.err
    assert ended.out == ""


@pytest.mark.parametrize("content", [None, b"no snapshot"])
def test_a_kv_cache_that_cannot_be_used(generate, tmp_path, content):
    path = tmp_path if content is None else tmp_path / "a.kv"
    if content is not None:
        path.write_bytes(content)
    ended = generate("-p", "x", "--kv-cache", path)
    assert ended.code == 1
    assert str(path) in ended.err.splitlines()[-1]


def test_a_model_that_is_not_there(shell, tmp_path):
    ended = shell("generate", "-p", "x", "--model", tmp_path / "none")
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("error", "debug", "last"),
    [
        (NumericalError("The target returned NaN logits."), False, "error: The target returned NaN logits."),
        (RuntimeError("two\nlines"), False, "unexpected RuntimeError: two lines."),
        (RuntimeError("two\nlines"), True, "unexpected RuntimeError: two lines."),
    ],
    ids=["NaN logits", "unforeseen", "unforeseen, debug"],
)
def test_an_error_of_the_target_ends_with_one_line(generate, forwards, error, debug, last):
    forwards.error = error
    ended = generate("-p", "x", *(["--debug"] if debug else []))
    assert ended.code == 1
    assert last in ended.err.splitlines()[-1]
    assert ("Traceback" in ended.err) is debug


def test_a_cache_in_fewer_bytes_is_said_to_be_another_model(generate):
    ended = generate("-p", "hello", "-n", 12, "--kv-dtype", "int8", "--compare", "--json")
    assert ended.code == 0 and last_line(ended.out)["exact"] is False
    assert "approximate" in ended.err
    refused = generate("-p", "hello", "--kv-dtype", "int4")
    assert refused.code != 0 and "int8" in refused.err
