"""The official client against a running server: answers, errors and load."""

from __future__ import annotations

import contextlib
import json
import socket
from http.client import HTTPConnection

import httpx
import openai
import pytest
import torch

from longdraft import Request, Speculator
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import MODEL, TOKENIZER, Running, make_service
from tests.serve.over_http import wait_until

MESSAGES = [
    {"role": "system", "content": "be brief."},
    {"role": "user", "content": "what is in the sea? a ship, a whale, a ship."},
]
PLAIN = Speculator("ar", MODEL, TOKENIZER, plan="fixed")
CHAT = "/v1/chat/completions"


def alone(n, **settings):
    """The result of the same request alone, without drafts."""
    prompt = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    return PLAIN.generate(Request(prompt, max_new_tokens=n, **settings))[0]


def chat(running, messages=MESSAGES, temperature=0, **options):
    return running.chat(messages, temperature=temperature, **options)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_an_answer_is_the_models_own(running):
    """Greedy; sampled with a seed, whatever drafts; and several with seeds of their own."""
    expected, found = alone(30), chat(running, max_tokens=30)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].finish_reason == {"length": "length", "eos": "stop"}[expected.finish_reason]
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.prompt_tokens == expected.prompt_tokens
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    for method in ("prompt-lookup", "ar"):
        found = chat(running, max_tokens=20, extra_body={"method": method}, **sampling)
        assert found.choices[0].message.content == alone(20, **sampling).text
    found = chat(running, max_tokens=12, temperature=1, seed=3, n=3)
    assert [c.message.content for c in found.choices] == [alone(12, temperature=1.0, seed=3 + i).text for i in range(3)]


def test_a_stream_is_the_answer_in_pieces_with_usage_at_the_end(running):
    expected = alone(30)
    chunks = list(chat(running, max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant" and len({c.id for c in chunks}) == 1
    assert chunks[-2].choices[0].finish_reason in ("length", "stop")
    usage = chunks[-1].usage
    assert usage.completion_tokens == len(expected.token_ids) and not chunks[-1].choices
    speculation = usage.model_extra["speculation"]
    assert speculation["num_accepted_tokens"] == sum(speculation["accepted_tokens_per_pos"])
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [c.usage.completion_tokens for c in chat(running, max_tokens=30, stream=True, extra_body=options)]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_vllm_and_llama_cpp_find_what_was_accepted(running, stream):
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = chat(running, max_tokens=30, **options)
    last = list(answer)[-1] if stream else answer
    own, timings = last.usage.model_extra["speculation"], last.model_extra["timings"]
    found = last.model_extra["metrics"]["speculative_decoding"]
    histogram, steps = found["acceptance_histogram"], found["num_spec_steps"]
    accepted = sum(n * times for n, times in enumerate(histogram))
    assert 0 < accepted < own["num_draft_tokens"] and steps == own["num_drafts"] == sum(histogram)
    assert accepted == found["num_accepted_draft_tokens"] == own["num_accepted_tokens"] == timings["draft_n_accepted"]
    assert found["num_draft_tokens"] == own["num_draft_tokens"] == timings["draft_n"]
    assert found["mean_acceptance_length"] == 1 + accepted / steps
    assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
    assert timings["predicted_n"] == last.usage.completion_tokens and timings["predicted_per_second"] > 0
    assert timings["prompt_n"] + timings["cache_n"] == last.usage.prompt_tokens
    plain = chat(running, max_tokens=8, extra_body={"method": "ar"})
    assert "metrics" not in plain.model_extra and "draft_n" not in plain.model_extra["timings"]
    assert not {"metrics", "timings"} & chat(running, max_tokens=8, n=2, temperature=1).model_extra.keys()


def test_a_trace_has_the_source_of_each_token(running):
    options = {"stream_options": {"include_trace": True}}
    chunks = list(chat(running, max_tokens=40, stream=True, extra_body=options))
    traces = [c.model_extra["trace"] for c in chunks if "trace" in c.model_extra]
    rounds = [t for t in traces if t["phase"] == "round"]
    assert traces[0] == {"phase": "prefill", "read": 0, "of": alone(1).prompt_tokens}  # before it is read
    assert "".join(piece for t in rounds for piece, _ in t["pieces"]) == text_of(chunks)
    for t in rounds[1:]:
        assert len(t["tree"]["tokens"]) == len(t["tree"]["parents"]) == len(t["tree"]["sources"])
        assert t["tree"]["accepted"][0] == 0
    assert {source for t in rounds for _, source in t["pieces"]} <= {"lookup", "target"}


def own_logits(ids):
    """The model's own logits after each token of a text."""
    with torch.inference_mode():
        logits: torch.Tensor = MODEL(torch.tensor([ids])).logits[0]
    return logits.clone()


BIAS = {str(token): -4.0 for token in TOKENIZER.convert_tokens_to_ids(list("aeiou "))} | {
    str(TOKENIZER.eos_token_id): -100.0
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.7, "top_p": 0.9, "seed": 3},
        {"frequency_penalty": 1.5, "presence_penalty": 1, "logit_bias": BIAS},
        {"temperature": 0.8, "seed": 4, "extra_body": {"repetition_penalty": 1.5, "method": "ar"}},
    ],
    ids=["greedy", "sampled", "penalised", "all of it"],
)
def test_log_probabilities_are_the_models_own_before_temperature_and_penalties(running, options):
    body = options.get("extra_body", {}) | {"return_token_ids": True}
    options = options | {"extra_body": body, "max_tokens": 12, "logprobs": True}
    choice = chat(running, top_logprobs=3, **options).choices[0]
    ids, content = choice.model_extra["token_ids"], choice.logprobs.content
    prompt = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    rows = own_logits([*prompt, *ids]).log_softmax(-1)[len(prompt) - 1 : -1]
    assert len(content) == len(ids) == len(rows) > 3
    for one, token, row in zip(content, ids, rows, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [t.logprob for t in one.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [t.token for t in one.top_logprobs] == [TOKENIZER.decode([i]) for i in best.indices.tolist()]
        assert one.token == bytes(one.bytes).decode() == TOKENIZER.decode([token])
    chunks = list(chat(running, stream=True, **options))
    streamed = [x for c in chunks if c.choices and c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert [x.logprob for x in streamed] == [x.logprob for x in content]


def test_penalties_and_biases_are_openais(running):
    """The presence penalty is subtracted once for a token in the output, the frequency penalty for each occurrence."""
    prompt = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    expected: list[int] = []
    while len(expected) < 30:
        logits = own_logits([*prompt, *expected])[-1]
        for token, value in BIAS.items():
            logits[int(token)] += value
        for token in set(expected):
            logits[token] -= 0.5 + 0.2 * expected.count(token)
        expected.append(int(logits.argmax()))
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": BIAS}
    found = chat(running, max_tokens=30, extra_body={"return_token_ids": True}, **penalties)
    assert found.choices[0].model_extra["token_ids"] == expected
    assert expected[:5] != alone(30).token_ids[:5] and len(set(expected)) < 30


def test_load_generators_get_answers_of_the_length_they_ask_for(running):
    end = {"logit_bias": {str(TOKENIZER.eos_token_id): 100}, "max_tokens": 9}
    assert chat(running, **end).usage.completion_tokens == 1
    assert chat(running, extra_body={"min_tokens": 4}, **end).usage.completion_tokens == 5
    assert chat(running, extra_body={"ignore_eos": True, "min_tokens": 9}, **end).usage.completion_tokens == 9
    expected, ids = alone(20), {"return_token_ids": True}
    assert chat(running, max_tokens=20, extra_body=ids).choices[0].model_extra["token_ids"] == expected.token_ids
    chunks = list(chat(running, max_tokens=20, stream=True, extra_body=ids))
    streamed = [x for c in chunks if c.choices for x in c.choices[0].model_extra.get("token_ids", ())]
    assert streamed == expected.token_ids


def test_completions_take_texts_and_token_ids(running):
    complete = running.client().completions.create
    texts = ["the sea", "the whale"]
    expected = [PLAIN.generate(text, max_new_tokens=9, chat=False)[0].text for text in texts]
    found = complete(model="tiny", prompt=texts, max_tokens=9, temperature=0)
    assert [c.text for c in found.choices] == expected
    ids = TOKENIZER(texts[1])["input_ids"]
    (choice,) = complete(model="tiny", prompt=ids, max_tokens=9, temperature=0, logprobs=2).choices
    assert choice.text == expected[1] and choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == list(range(9))


def test_an_echoed_prompt_has_the_models_own_log_probabilities_whatever_was_kept(running):
    complete = running.client().completions.create
    options = {"model": "tiny", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    text = "the whale and the sea, the whale and the ship"
    ids = TOKENIZER(text)["input_ids"]
    for prompt in (text, ids):  # the second time its KV is cached
        (choice,) = complete(prompt=prompt, echo=True, **options).choices
        scored = choice.logprobs
        assert choice.text.startswith(text) and len(scored.tokens) == len(ids) + 3
        assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
        logits = MODEL(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        expected = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert scored.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert scored.top_logprobs[1] and len(scored.top_logprobs[1]) == 2
    assert choice.text[len(text) :] == complete(prompt=text, **options).choices[0].text
    chunks = list(complete(prompt=text, echo=True, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert [x for chunk in chunks for x in chunk.choices[0].logprobs.token_logprobs] == scored.token_logprobs


def test_a_completion_with_a_suffix_is_what_the_model_says_between():
    """With Qwen-Coder's tokens. A file separator ends it."""
    model, tokenizer = byte_model(), byte_tokenizer()
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer.add_tokens(names, special_tokens=True)
    before, between, answer = ends = tokenizer.convert_tokens_to_ids(names)
    code, rest = (tokenizer(text)["input_ids"] for text in ("def f(x):", "return y"))
    request = Request([before, *code, between, *rest, answer], 20, eos_token_ids=[*ends, tokenizer.eos_token_id])
    (expected,) = Speculator("ar", model, tokenizer, plan="fixed").generate(request)
    with contextlib.closing(Running(make_service(model, tokenizer, context=1200))) as running:
        found = running.client().completions.create(
            model="tiny", prompt="def f(x):", suffix="return y", max_tokens=20, temperature=0
        )
    assert found.choices[0].text == expected.text and found.usage.prompt_tokens == expected.prompt_tokens


def test_a_prompt_that_was_read_is_not_read_again_whoever_asked_between(serving):
    document, one_slot, cached = "once upon a time, a ship went to sea. " * 8, serving(slots=1), []
    for text in (document + "who?", "a whale said to a ship: " * 12, document + "why?", document + "when?"):
        answer = chat(one_slot, [{"role": "user", "content": text}], max_tokens=3)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert max(cached[:2]) < len(document) <= min(cached[2:])
    unkept = chat(one_slot, [{"role": "user", "content": text}], max_tokens=3, extra_body={"cache_prompt": False})
    assert unkept.usage.prompt_tokens_details.cached_tokens == 0


def test_a_client_that_goes_away_leaves_its_slot_and_is_counted(serving):
    running = serving()
    with pytest.raises(TimeoutError):
        running.http(CHAT, {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True}, timeout=0.02)
    with chat(running, max_tokens=500, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    left = 'longdraft:request_failure_total{model_name="tiny",status="499"} 2.0'
    wait_until(lambda: left in running.http("/metrics")[1].decode())
    assert running.becomes_idle()


def test_operators_and_the_page_get_what_they_need(running):
    chat(running, max_tokens=8)
    assert json.loads(running.http("/health")[1])["status"] == "ok"
    assert json.loads(running.http("/ready")[1])["ready"] and json.loads(running.http("/version")[1])["version"]
    (model,) = running.client().models.list().data
    assert model.id == "tiny" and running.client().models.retrieve("tiny").id == "tiny"
    metrics = running.http("/metrics")[1].decode()
    for name in ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
                 "verifications", "verification_tokens", "generation_tokens", "prefix_cache_hits",
                 "num_requests_running", "time_to_first_token_seconds_bucket"):  # fmt: skip
        assert f"longdraft:{name}" in metrics
    assert b"<html" in running.http("/")[1]
    tokens = json.loads(running.http("/tokenize", {"prompt": "the sea"})[1])["tokens"]
    assert tokens == TOKENIZER("the sea")["input_ids"]


# --- load and failures ---


def test_too_many_requests_are_told_when_to_come_again(serving):
    running = serving(slots=1, queue=2)
    body = {"messages": MESSAGES, "max_tokens": 2, "temperature": 1}
    assert running.http(CHAT, body | {"n": 3})[0] == 200
    assert running.http(CHAT, body | {"n": 4})[0] == 400  # it would be too much at any time
    streams = []
    with pytest.raises(openai.RateLimitError) as refused:
        for _ in range(5):
            streams.append(chat(running, max_tokens=400, stream=True, extra_body={"ignore_eos": True}))
    assert int(refused.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    assert running.becomes_idle()  # slots are free once clients have gone
    assert chat(running, max_tokens=2).choices


def test_keys_are_needed_and_one_keys_text_is_never_looked_up_for_another(serving):
    running = serving(keys={"a": "ka", "b": "kb"}, earlier=5000)
    with pytest.raises(openai.AuthenticationError):
        running.client("wrong").models.list()
    assert running.client("kb").models.list().data and running.http("/health")[0] == 200

    def length(key):
        found = chat(running, key=key, max_tokens=60, temperature=1, seed=5, extra_body={"ignore_eos": True})
        return found.usage.model_extra["speculation"]["mean_accepted_length"]

    first, again, other = length("ka"), length("ka"), length("kb")
    assert again > first + 1 and other == first


def test_a_body_that_is_too_large_or_never_ends_is_refused(serving):
    running = serving(max_body_bytes=10_000, body_timeout=0.3)
    assert running.http(CHAT, {"messages": [{"role": "user", "content": "a" * 20_000}]})[0] == 413
    with socket.create_connection(("127.0.0.1", running.server.port)) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        half.settimeout(10)
        assert b" 408 " in half.recv(200)


def test_shutting_down_answers_what_runs_and_refuses_new_requests(serving):
    running = serving()
    stream = chat(running, max_tokens=300, stream=True, extra_body={"ignore_eos": True})
    first = next(stream).choices[0].delta.content
    running.server.handle_exit(15, None)
    wait_until(lambda: running.service.worker.draining)
    assert running.http(CHAT, {"messages": MESSAGES, "max_tokens": 3})[0] == 503
    kept = HTTPConnection("127.0.0.1", running.server.port, timeout=10)
    kept.request("GET", "/ready")
    answer = kept.getresponse()  # a client that reuses its connection does not keep the server running
    assert answer.status == 503 and answer.getheader("connection") == "close"
    assert first + text_of(stream) == alone(300, eos_token_ids=[]).text
    running.thread.join(20)
    assert not running.thread.is_alive() and not running.service.worker.alive


def test_a_second_signal_ends_what_runs(serving):
    running = serving()
    body = {"max_tokens": 500, "stream": True, "n": 3, "extra_body": {"ignore_eos": True, "method": "ar"}}
    streams = [chat(running, **body) for _ in range(4)]
    next(streams[0])
    running.server.handle_exit(15, None)
    running.server.handle_exit(15, None)
    running.thread.join(20)
    assert not running.thread.is_alive()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        for stream in streams:
            text_of(stream)
