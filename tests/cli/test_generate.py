"""``longdraft generate`` from the command line to its output."""

from __future__ import annotations

import json
import re
import signal

import pytest

from longdraft import Generation, Speculator
from longdraft.engine.streaming import TextStream
from longdraft.errors import NumericalError

KEYS = {
    "text", "token_ids", "prompt_tokens", "new_tokens", "method", "exact", "finish_reason", "prefill_seconds",
    "decode_seconds", "tokens_per_second", "mean_accepted_length", "rounds", "peak_memory_bytes", "arithmetic",
}  # fmt: skip


def last_line(out: str) -> dict:
    return json.loads(out.splitlines()[-1])


def test_stdout_is_the_text_or_an_object_and_stderr_the_figures(generate):
    ended = generate("-p", "hello", "-n", 12, "--json")
    assert len(ended.out.splitlines()) == 1  # the text is in the object only
    found = last_line(ended.out)
    assert {*found} == KEYS
    assert found["new_tokens"] == len(found["token_ids"]) == 12
    assert (found["method"], found["exact"], found["finish_reason"]) == ("prompt-lookup", True, "length")
    assert found["mean_accepted_length"] == pytest.approx(11 / found["rounds"])
    assert found["tokens_per_second"] == pytest.approx(11 / found["decode_seconds"])
    ended = generate("-n", 12, stdin=b"hello")  # what is piped in is the prompt
    assert (ended.code, ended.out) == (0, found["text"] + "\n") and "\x1b" not in ended.out + ended.err
    for figure in ("prompt-lookup, exact", "prompt ", "12 tokens in", "tokens/s", "at peak", "mean accepted length: "):
        assert figure in ended.err
    assert any(line.startswith("kernels ") and "longdraft's own" in line for line in ended.err.splitlines())


@pytest.mark.parametrize("sampling", [(), ("-t", 0.9, "--top-p", 0.95)], ids=["greedy", "sampled"])
def test_compare_with_ar(generate, forwards, sampling):
    ended = generate("-p", "hello hello hello hello", "-n", 40, "--compare", "--json", *sampling)
    prompt, again = read(forwards)
    assert prompt > 1 == again  # it is read once
    found = last_line(ended.out)
    compare = found["compare"]
    assert {*found} == KEYS | {"compare"} and {*compare["ar"]} == KEYS
    assert {*compare} == {"ar", "speedup_vs_ar", "tokens_agree", "near_tie"}
    assert (compare["ar"]["method"], compare["ar"]["mean_accepted_length"]) == ("ar", 1.0)
    assert (compare["tokens_agree"], compare["near_tie"]) == (True, None)
    assert compare["ar"]["token_ids"] == found["token_ids"] and (found["mean_accepted_length"] > 1 or sampling)
    speedup = found["tokens_per_second"] / compare["ar"]["tokens_per_second"]
    assert compare["speedup_vs_ar"] == pytest.approx(speedup)
    assert f"all {found['new_tokens']} tokens agree with ar" in ended.err and "one run each" in ended.err
    assert ("--seed" in ended.err) == bool(sampling)


def test_raw_has_no_chat_template(generate):
    chat, raw = (last_line(generate("-p", "hello", "-n", 1, "--json", *more).out) for more in ([], ["--raw"]))
    assert raw["prompt_tokens"] == len("hello") < chat["prompt_tokens"]


def test_a_stop_string_is_not_printed(generate):
    whole = last_line(generate("-p", "hello", "-n", 30, "--json").out)["text"]
    stop = whole[4:7]
    ended = generate("-p", "hello", "-n", 30, "--stop", stop)
    assert ended.out.rstrip("\n") == whole[: whole.index(stop)] and "stop string" in ended.err


def read(forwards) -> list[int]:
    """Tokens of each prefill forward since the last call."""
    pieces = [f.rows for f in forwards if f.logits != "all"]
    forwards.clear()
    return pieces


def test_the_second_run_with_a_kv_cache_reads_one_token(generate, tmp_path, forwards):
    file = tmp_path / "new folder" / "prompt.kv"
    arguments = ("-p", "hello " * 20, "-n", 10, "--kv-cache", file)
    first = generate(*arguments)
    prompt_tokens = sum(read(forwards))
    assert prompt_tokens > 100
    assert f"saved {prompt_tokens} prompt tokens" in first.err
    second = generate(*arguments)
    assert read(forwards) == [1]
    assert second.out == first.out
    assert f"{prompt_tokens - 1} of {prompt_tokens} prompt tokens reused" in second.err
    other = generate("-p", "hello " * 19 + "world?", "-n", 10, "--kv-cache", file)
    assert other.code == 0
    assert 1 < sum(read(forwards)) < 20


@pytest.mark.parametrize(("times", "said"), [(1, "Cancelled."), (2, "Aborted.")])
def test_ctrl_c_prints_what_there_is_and_a_second_one_aborts(generate, press_ctrl_c, times, said):
    handler = signal.getsignal(signal.SIGINT)
    whole = generate("-p", "hello", "-n", 100, "--method", "ar").out
    press_ctrl_c(TextStream, "push", 10, times=times)
    ended = generate("-p", "hello", "-n", 100, "--method", "ar", "--compare")
    assert ended.code == 130 and said in ended.err and "Traceback" not in ended.err
    assert 0 < len(ended.out) < len(whole) and ended.out.endswith("\n")
    assert whole.startswith(ended.out.rstrip("\n")) and signal.getsignal(signal.SIGINT) is handler
    assert "compared" not in ended.err and ("10 tokens in" in ended.err) == (times == 1)


def test_ctrl_c_while_the_prompt_is_read(generate, press_ctrl_c, tmp_path):
    press_ctrl_c(Speculator, "stream")
    ended = generate("-p", "hello", "-n", 10, "--kv-cache", tmp_path / "a.kv")
    assert (ended.code, ended.out) == (130, "") and "cancelled while" in ended.err
    assert not (tmp_path / "a.kv").exists()


def test_a_difference_is_shown_for_what_it_is(generate, monkeypatch):
    results, seen = Generation.results, []

    def wrong(self):
        found = results(self)
        if not seen:  # the method's own run comes first
            found[0].token_ids[3] = (found[0].token_ids[3] + 1) % 61
        seen.append(found)
        return found

    monkeypatch.setattr(Generation, "results", wrong)
    ended = generate("-p", "hello", "-n", 10, "--compare", "--json")
    compare = last_line(ended.out)["compare"]
    assert (compare["tokens_agree"], compare["near_tie"]) == (False, False)
    assert "first differ at new token 4" in ended.err and "no near tie" in ended.err


@pytest.mark.parametrize(
    ("error", "debug", "last"),
    [
        (NumericalError("The target returned NaN logits."), False, "error: The target returned NaN logits."),
        *((RuntimeError("two\nlines"), debug, "unexpected RuntimeError: two lines.") for debug in (False, True)),
    ],
)
def test_an_error_of_the_target_ends_with_one_line(generate, forwards, error, debug, last):
    forwards.error = error
    ended = generate("-p", "x", *(["--debug"] if debug else []))
    assert ended.code == 1
    assert last in ended.err.splitlines()[-1]
    assert ("Traceback" in ended.err) is debug


def test_a_cache_in_fewer_bytes_is_said_to_be_another_model(generate):
    ended = generate("-p", "hello", "-n", 12, "--kv-dtype", "int8", "--compare", "--json")
    assert ended.code == 0 and last_line(ended.out)["exact"] is False and "approximate" in ended.err
    assert "ar), without approximations" in ended.err
    assert "without approximations" not in generate("-p", "hello", "-n", 4, "--compare").err


def test_what_was_chosen_and_what_has_no_effect_is_said(generate):
    ended = generate("-p", "hi", "-n", "4", "-o", "branches=2", "--top-p", "0.9")
    assert ended.code == 0 and "decoding with prompt-lookup, which has the option branches" in ended.err
    assert "--top-p: no effect" in ended.err
    assert not re.search("No --method|no effect", generate("-p", "hi", "-n", "4").err)


def test_the_kv_kept_elsewhere_is_the_same_answer_and_keeps_prompts(generate, cpu_offloads, tmp_path):
    asked = ("-p", "hello hello hello hello", "-n", 30, "--json")
    expected = last_line(generate(*asked).out)["token_ids"]
    for more in (("--offload", "host:1", "--compare"), ("--offload", "host:0"), ()):
        assert last_line(generate(*asked, *more, "--kv-cache", tmp_path / "kv").out)["token_ids"] == expected
