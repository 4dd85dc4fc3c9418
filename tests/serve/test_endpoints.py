"""What clients get: the official client against a running server."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest

from longdraft import Request, Speculator
from tests.serve.conftest import MODEL, TOKENIZER

ASKED = [
    {"role": "system", "content": "be brief."},
    {"role": "user", "content": "what is in the sea? a ship, a whale, a ship."},
]


def alone(messages, n, **settings):
    """The same request by itself, plainly decoded."""
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    spec = Speculator("ar", MODEL, TOKENIZER, plan="fixed")
    return spec.generate(Request(prompt, max_new_tokens=n, **settings))[0]


def chat(running, messages=ASKED, **options):
    return running.client().chat.completions.create(model="tiny", messages=messages, **options)


def test_a_greedy_answer_is_what_the_model_alone_says(running):
    expected = alone(ASKED, 30)
    found = chat(running, max_tokens=30, temperature=0)
    assert found.choices[0].message.content == expected.text
    assert (
        found.usage.completion_tokens == len(expected.token_ids) and found.usage.prompt_tokens == expected.prompt_tokens
    )
    assert found.choices[0].finish_reason == {"length": "length", "eos": "stop"}[expected.finish_reason]


def test_a_sampled_answer_follows_its_seed(running):
    expected = alone(ASKED, 20, temperature=0.9, top_p=0.95, seed=7)
    for method in ("prompt-lookup", "ar"):
        found = chat(running, max_tokens=20, temperature=0.9, top_p=0.95, seed=7, extra_body={"method": method})
        assert found.choices[0].message.content == expected.text


def test_several_answers_have_seeds_of_their_own(running):
    found = chat(running, max_tokens=12, temperature=1, seed=3, n=3)
    texts = [c.message.content for c in found.choices]
    assert texts == [alone(ASKED, 12, temperature=1.0, seed=3 + i).text for i in range(3)]


def test_streams_are_the_answer_in_pieces_with_usage_at_the_end(running):
    expected = alone(ASKED, 30)
    chunks = list(chat(running, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("length", "stop")
    usage = chunks[-1].usage
    assert usage.completion_tokens == len(expected.token_ids) and not chunks[-1].choices
    said = usage.model_extra["speculation"]
    assert said["num_accepted_tokens"] == sum(said["accepted_tokens_per_pos"])
    assert {c.id for c in chunks} == {chunks[0].id}
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c.usage.completion_tokens for c in chat(running, max_tokens=30, temperature=0, stream=True,
                                                      extra_body={"stream_options": options})]  # fmt: skip
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == usage.completion_tokens


def test_a_trace_says_who_proposed_what(running):
    extra = {"stream_options": {"include_trace": True}}
    chunks = list(chat(running, max_tokens=40, temperature=0, stream=True, extra_body=extra))
    traces = [c.model_extra["trace"] for c in chunks if "trace" in c.model_extra]
    rounds = [t for t in traces if t["phase"] == "round"]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "".join(piece for t in rounds for piece, _ in t["pieces"]) == text
    for t in rounds[1:]:
        assert len(t["tree"]["tokens"]) == len(t["tree"]["parents"]) == len(t["tree"]["sources"])
        assert t["tree"]["accepted"][0] == 0
    assert {source for t in rounds for _, source in t["pieces"]} <= {"lookup", "target"}


def test_log_probabilities_are_the_models_own(running):
    found = chat(running, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    content = found.choices[0].logprobs.content
    assert len(content) == found.usage.completion_tokens
    for one in content:
        assert len(one.top_logprobs) == 3 and one.logprob == one.top_logprobs[0].logprob <= 0
        assert one.token == one.top_logprobs[0].token and bytes(one.bytes).decode() == one.token
        assert sum(math.exp(t.logprob) for t in one.top_logprobs) <= 1 + 1e-5
    chunks = list(chat(running, max_tokens=5, temperature=0, logprobs=True, stream=True))
    streamed = [x for c in chunks if c.choices and c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert [x.logprob for x in streamed] == [x.logprob for x in content]


def test_penalties_and_biases_change_the_text(running):
    plain = chat(running, max_tokens=30, temperature=0).choices[0].message.content
    token = TOKENIZER.convert_tokens_to_ids("z")
    zs = chat(running, max_tokens=5, temperature=0, logit_bias={str(token): 100}).choices[0].message.content
    assert zs == "zzzzz"
    penalised = chat(running, max_tokens=30, temperature=0, frequency_penalty=2, presence_penalty=2)
    assert penalised.choices[0].message.content != plain


def test_stop_strings_end_the_answer_and_are_no_part_of_it(running):
    whole = alone(ASKED, 30).text
    stop = whole[4:6]
    found = chat(running, max_tokens=30, temperature=0, stop=[stop])
    assert found.choices[0].finish_reason == "stop"
    assert found.choices[0].message.content == whole[: whole.index(stop)]
    chunks = chat(running, max_tokens=30, temperature=0, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[: whole.index(stop)]


def test_completions_take_texts_and_token_ids(running):
    client = running.client()
    spec = Speculator("ar", MODEL, TOKENIZER, plan="fixed")
    ids = TOKENIZER("the whale")["input_ids"]
    expected = [spec.generate(p, max_new_tokens=9, chat=False)[0].text for p in ("the sea", "the whale")]
    found = client.completions.create(model="tiny", prompt=["the sea", "the whale"], max_tokens=9, temperature=0)
    assert [c.text for c in found.choices] == expected
    found = client.completions.create(model="tiny", prompt=ids, max_tokens=9, temperature=0, logprobs=2)
    assert found.choices[0].text == expected[1] and len(found.choices[0].logprobs.tokens) == 9


def test_responses_are_text_whole_and_streamed(running):
    client = running.client()
    expected = alone(ASKED, 12).text
    arguments = {
        "model": "tiny",
        "instructions": "be brief.",
        "input": ASKED[1]["content"],
        "max_output_tokens": 12,
        "temperature": 0,
    }
    found = client.responses.create(**arguments)
    assert found.output_text == expected and found.usage.output_tokens > 0
    events = list(client.responses.create(**arguments, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
    assert [e.sequence_number for e in events] == list(range(len(events))) and events[0].type == "response.created"
    # It has ended at its limit, which is an incomplete response to OpenAI.
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == expected
    with client.responses.stream(**arguments | {"max_output_tokens": 400, "temperature": 1.0}) as stream:
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text


def test_predicted_outputs_are_looked_up_and_counted(running):
    answer = alone(ASKED, 40).text
    prediction = {"type": "content", "content": answer}
    plain = chat(running, max_tokens=40, temperature=0)
    found = chat(running, max_tokens=40, temperature=0, prediction=prediction)
    assert found.choices[0].message.content == plain.choices[0].message.content == answer
    details = found.usage.completion_tokens_details
    assert (
        details.accepted_prediction_tokens >= 36 and details.rejected_prediction_tokens <= 4
    )  # special tokens are no text
    lengths = [f.usage.model_extra["speculation"]["mean_accepted_length"] for f in (plain, found)]
    assert lengths[1] > max(4, lengths[0])


def test_a_prompt_that_was_read_is_not_read_again(running):
    document = "once upon a time, a ship went to sea. " * 8
    first = chat(running, [{"role": "user", "content": document + "who?"}], max_tokens=3, temperature=0)
    second = chat(running, [{"role": "user", "content": document + "why?"}], max_tokens=3, temperature=0)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= len(document) > first.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"audio": {}}, 400, "audio"),
        ({"temperature": 3}, 400, "temperature"),
        ({"n": 99}, 400, "n"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, None),
        ({"max_tokens": 100000}, 400, "messages"),
        ({"method": "nonsense"}, 400, "method"),
        ({"model": "gpt-4"}, 404, "model"),
        ({"logit_bias": {"999": 1}}, 400, "logit_bias"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_openais_error(running, body, status, param):
    asked = {"model": "tiny", "messages": ASKED, "max_tokens": 4} | body
    request = urllib.request.Request(
        f"{running.url}/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    error = json.loads(refused.value.read())["error"]
    assert refused.value.code == status and error["message"] and error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_a_body_that_is_no_json_is_refused(running):
    asked = urllib.request.Request(f"{running.url}/v1/completions", b"{bad", {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=20)
    error = json.loads(refused.value.read())["error"]
    assert refused.value.code == 400 and error["param"] is None and "JSON" in error["message"]


def test_a_client_that_goes_away_while_it_waits_leaves_its_slot(running):
    body = json.dumps({"model": "tiny", "messages": ASKED, "max_tokens": 400, "ignore_eos": True}).encode()
    asked = urllib.request.Request(f"{running.url}/v1/chat/completions", body, {"content-type": "application/json"})
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(asked, timeout=0.02).read()
    until = time.monotonic() + 10
    while running.service.worker.load != (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    assert running.service.worker.load == (0, 0)


def test_what_operators_want(running):
    chat(running, max_tokens=8, temperature=0)

    def get(path):
        with urllib.request.urlopen(running.url + path, timeout=20) as answer:
            return answer.read().decode()

    assert json.loads(get("/health"))["status"] == "ok" and json.loads(get("/ready"))["ready"]
    assert json.loads(get("/version"))["version"]
    (model,) = running.client().models.list().data
    assert model.id == "tiny" and running.client().models.retrieve("tiny").id == "tiny"
    metrics = get("/metrics")
    for name in ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
                 "generation_tokens", "prefix_cache_hits", "num_requests_running",
                 "time_to_first_token_seconds_bucket"):  # fmt: skip
        assert f"longdraft:{name}" in metrics
    assert "<html" in get("/")
    body = json.dumps({"prompt": "the sea"}).encode()
    asked = urllib.request.Request(running.url + "/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        assert json.loads(answer.read())["tokens"] == TOKENIZER("the sea")["input_ids"]


# --- load, and what goes wrong ---


def test_too_many_are_told_to_come_again(serving):
    running = serving(slots=1, queue=1)
    streams = []
    with pytest.raises(openai.RateLimitError) as refused:
        for _ in range(4):
            streams.append(chat(running, max_tokens=400, stream=True, extra_body={"ignore_eos": True}))
    assert int(refused.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    until = time.monotonic() + 10
    while running.service.worker.load != (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    assert running.service.worker.load == (0, 0)  # slots are free within a round once clients have gone
    assert chat(running, max_tokens=2, temperature=0).choices


def test_keys_are_asked_for(serving):
    running = serving(keys={"a": "secret-a", "b": "secret-b"})
    with pytest.raises(openai.AuthenticationError):
        running.client("wrong").models.list()
    assert running.client("secret-b").models.list().data
    with urllib.request.urlopen(running.url + "/health", timeout=20) as answer:
        assert answer.status == 200


def test_one_keys_text_is_never_looked_up_for_another(serving):
    running = serving(keys={"a": "ka", "b": "kb"}, earlier=5000)
    messages = [{"role": "user", "content": "tell me."}]

    def length(key):
        found = running.client(key).chat.completions.create(model="tiny", messages=messages, max_tokens=60,
                                                            temperature=1, seed=5,
                                                            extra_body={"ignore_eos": True})  # fmt: skip
        return found.usage.model_extra["speculation"]["mean_accepted_length"]

    first, again, other = length("ka"), length("ka"), length("kb")
    assert again > first + 1 and other == first


def test_an_exception_in_one_request_ends_that_request(serving, monkeypatch):
    from longdraft.serve import processors

    running = serving()
    asked = processors.Bias.__call__

    def failing(self, input_ids, scores):
        if self.by_token == {7: 1.0} and input_ids.shape[1] > 70:
            raise RuntimeError("this one")
        return asked(self, input_ids, scores)

    monkeypatch.setattr(processors.Bias, "__call__", failing)
    found = {}

    def ask(name, **options):
        try:
            found[name] = (
                chat(running, max_tokens=60, extra_body={"ignore_eos": True}, **options).choices[0].message.content
            )
        except openai.APIError as error:
            found[name] = error

    threads = [
        threading.Thread(target=ask, args=("good",), kwargs={"temperature": 0}),
        threading.Thread(target=ask, args=("sampled",), kwargs={"temperature": 1, "seed": 4}),
        threading.Thread(target=ask, args=("bad",), kwargs={"temperature": 0, "logit_bias": {"7": 1}}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert isinstance(found["bad"], openai.InternalServerError)
    assert found["good"] == alone(ASKED, 60, eos_token_ids=[]).text
    assert found["sampled"] == alone(ASKED, 60, eos_token_ids=[], temperature=1.0, seed=4).text


def test_a_body_that_is_too_large_or_never_ends_is_refused(serving):
    import socket

    running = serving(max_body=10_000, body_seconds=0.3)
    with pytest.raises(openai.APIStatusError) as refused:
        chat(running, [{"role": "user", "content": "a" * 20_000}])
    assert refused.value.status_code == 413
    with socket.create_connection(("127.0.0.1", running.server.port)) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        half.settimeout(10)
        assert b" 408 " in half.recv(200)


def test_a_request_that_takes_too_long_ends(serving):
    running = serving(timeout=0.05)
    with pytest.raises(openai.APIStatusError) as late:
        chat(running, max_tokens=500, extra_body={"ignore_eos": True, "method": "ar"}, n=3)
    assert late.value.status_code == 504


def test_shutting_down_answers_what_runs_and_refuses_what_comes(serving):
    running = serving()
    stream = chat(running, max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True})
    first = next(stream).choices[0].delta.content
    running.server.handle_exit(15, None)
    while not running.service.worker.draining:
        time.sleep(0.001)
    with pytest.raises(openai.APIStatusError) as refused:
        chat(running, max_tokens=3)
    assert refused.value.status_code == 503
    rest = "".join(c.choices[0].delta.content or "" for c in stream)
    assert first + rest == alone(ASKED, 300, eos_token_ids=[]).text
    running.thread.join(20)
    assert not running.thread.is_alive() and not running.service.worker.alive
