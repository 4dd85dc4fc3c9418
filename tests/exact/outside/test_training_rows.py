"""Rows as people have them: what of them is learned, with templates of models that think, and how they are split."""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("accelerate")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longdraft.errors import ConfigError, PromptError
from longdraft.training import dataset
from longdraft.training.answers import AnswerFile, AnswerPrompt, generate_answers
from longdraft.training.config import LmConfig, RunConfig
from longdraft.training.documents import SkipCounts, encode_documents
from tests.training.helpers import WORDS

SIMPLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Answers of earlier turns and of the last lose what lies before </think>; the prompt opens a thought (QwQ, R1).
DROPS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# Shows the thought of answers behind the last question alone, and takes a setting (Qwen3).
SHOWS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOLS = "{% if tools %}[TOOLS {{ tools | tojson }}]{% endif %}" + SIMPLE.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}",
)


def tokenizer(template: str | None = SIMPLE) -> PreTrainedTokenizerFast:
    """One token a byte, and the end of a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    made.chat_template = template
    return made


def read(rows, shape=SIMPLE, tmp_path=None, **more):
    """(context and learned text by turns, what was left out)."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    skipped, chars = SkipCounts(), tokenizer(shape)
    found = []
    for document in filter(None, encode_documents([path], chars, skipped, 300, **more)):
        learned = document.loss_mask or [i >= document.start for i in range(len(document.token_ids))]
        assert document.start == learned.index(True)
        runs, last = [], None
        for token, is_learned in zip(document.token_ids, learned, strict=True):
            if is_learned != last:
                runs.append([])
            runs[-1].append(token)
            last = is_learned
        found.append([chars.decode(run) for run in runs])
    return found, skipped


CHAT = [("user", "hi"), ("assistant", "yes"), ("user", "and?"), ("assistant", "no")]
ROLES = {"user": "human", "assistant": "gpt"}
FORMS = {
    "messages": {"messages": [{"role": r, "content": c} for r, c in CHAT]},
    "parts": {"messages": [{"role": r, "content": [{"type": "text", "text": c}]} for r, c in CHAT]},
    "ShareGPT": {"conversations": [{"from": ROLES[r], "value": c} for r, c in CHAT]},
    "SpecForge": {"id": "1", "conversations": [{"role": r, "content": c} for r, c in CHAT]},
    "UltraChat": {"data": [c for _, c in CHAT]},
    "begun by the assistant": {"messages": [{"role": r, "content": c} for r, c in [("assistant", "hello"), *CHAT]]},
    "not answered in the end": {"messages": [{"role": r, "content": c} for r, c in [*CHAT, ("user", "why?")]]},
}


PAIRS = [
    {"prompt": "hi", "response": "yes"}, {"prompt": "hi", "completion": "yes"}, {"question": "hi", "answer": "yes"},
    {"instruction": "hi", "output": "yes", "input": ""}, {"prompt": "hi", "answer": "yes", "id": 3},
    {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "yes"}]},
    {"text": None, "messages": None, "tokens": None, "prompt": "hi", "response": "yes"},
]  # fmt: skip


def test_only_the_assistants_turns_are_learned_whatever_the_form(tmp_path):
    turns = ["<|user|>hi<|end|>\n<|assistant|>", "yes<|end|>", "\n<|user|>and?<|end|>\n<|assistant|>", "no<|end|>"]
    assert read(FORMS.values(), tmp_path=tmp_path) == ([turns] * len(FORMS), {})
    assert read(PAIRS, tmp_path=tmp_path)[0] == [turns[:2]] * len(PAIRS)
    system = [row | {"system": "be brief"} for row in PAIRS]
    assert read(system, tmp_path=tmp_path)[0] == [["<|system|>be brief<|end|>\n" + turns[0], turns[1]]] * len(PAIRS)
    # An instruction with its input, questions with their context, and one without an answer.
    count = {"instruction": "count", "input": "a b", "output": "2"}
    squad = {"context": "a b", "question": "first?", "answers": {"text": ["a", "b"], "answer_start": [0, 2]}}
    dolly = {"context": "a b", "instruction": "first?", "response": "a", "category": "closed_qa"}
    none = squad | {"answers": {"text": [], "answer_start": []}}
    found, skipped = read([count, squad, dolly, none], tmp_path=tmp_path)
    assert found[0] == ["<|user|>count\n\na b<|end|>\n<|assistant|>", "2<|end|>"]
    assert found[1:] == [["<|user|>a b\n\nfirst?<|end|>\n<|assistant|>", "a<|end|>"]] * 2 and skipped.total() == 1


def thought(inside: bool, *, turns: int = 1, **more):
    """A chat whose answers have a thought, in a field of its own or inside of the answer."""
    said = {"content": "<think>\nwell\n</think>\n\nyes"} if inside else {"content": "yes", "reasoning_content": "well"}
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **said}] * turns, **more}


@pytest.mark.parametrize("inside", [True, False])
def test_thoughts_are_learned_as_the_model_wrote_them(inside, tmp_path):
    """Those of earlier turns as the template shows them; an end that was cut off is not learned."""
    asked, dropped = "<|user|>hi<|end|>\n<|assistant|>", "well\n</think>\n\nyes<|end|>"
    shown = ["<|user|>\nhi<|end|>\n<|assistant|>\n", "<think>\nwell\n</think>\n\nyes<|end|>"]
    for row, template, expected in (
        (thought(inside), DROPS, [asked + "<think>\n", dropped]),
        (thought(inside), SHOWS, shown),
        (thought(inside, cut=True), DROPS, [asked + "<think>\n", dropped.removesuffix("<|end|>")]),
        (thought(inside, turns=2), DROPS, [asked, "yes<|end|>", f"\n{asked}<think>\n", dropped]),
        (thought(inside, turns=2), SHOWS, [shown[0], "yes<|end|>", "\n" + shown[0], shown[1]]),
    ):
        assert read([row], template, tmp_path)[0] == [expected]


def test_other_thoughts(tmp_path):
    """In a template's own way; none where the prompt opens one; and one that was cut off."""
    own = SIMPLE.replace("{{ m.content }}", "{% if m.thinking %}[{{ m.thinking }}]{% endif %}{{ m.content }}")
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "thinking": "well"}]}
    assert read([row], own, tmp_path)[0][0][1] == "[well]yes<|end|>"
    found, skipped = read([row], SIMPLE, tmp_path)
    assert not found and "with reasoning that the chat template does not show" in str(skipped)
    found, skipped = read([FORMS["messages"]], DROPS, tmp_path)
    assert not skipped and found[0][1::2] == ["yes<|end|>", "no<|end|>"]
    row["messages"][1] = {"role": "assistant", "content": "", "reasoning_content": "wel"}
    assert read([row | {"cut": True}], DROPS, tmp_path)[0] == [["<|user|>hi<|end|>\n<|assistant|><think>\n", "wel"]]


# The last answer ends in a way of its own (gpt-oss, Phi-3); the system prompt stands before a last question (Mistral).
ENDS = SIMPLE.replace("<|end|>", "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}")
PADS = SIMPLE + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
MOVES = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ messages[0].content + ' ' if loop.last and messages[0].role == 'system' }}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_earlier_answers_are_learned_where_the_last_is_shown_in_another_way(tmp_path):
    rows = [FORMS["messages"]]
    turns = ["<|user|>hi<|end|>\n<|assistant|>", "yes<|end|>", "\n<|user|>and?<|end|>\n<|assistant|>", "no<|end|>"]
    # An end that the model writes in another way is not learned.
    ends = [turns[0], "yes", "<|end|>" + turns[2], "no<|return|>"]
    assert read(rows, ENDS, tmp_path)[0] == [ends]
    assert read(rows, PADS, tmp_path)[0] == [[*turns[:3], "no<|end|>\n<|endoftext|>"]]
    with_system = [rows[0] | {"system": "be brief"}]
    moved = ["[INST] hi[/INST] ", "yes</s>", "[INST] be brief and?[/INST]", " no</s>"]
    assert read(with_system, MOVES, tmp_path)[0] == [moved]


def test_calls_as_the_template_takes_them(tmp_path):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    joined = SIMPLE.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '>' + c.function.name + "
        "c.function.arguments }}{% endfor %}"
    )  # fmt: skip
    assert read([{"messages": messages}], joined, tmp_path)[0][0][1] == '>weather{"city": "Rome"}<|end|>'
    found, skipped = read([{"messages": messages}], SIMPLE, tmp_path)
    assert not found
    assert "with a tool call that the chat template does not show" in str(skipped)


def test_settings_of_the_template(tmp_path):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    off = ["<|user|>\nhi<|end|>\n<|assistant|>\n<think>\n\n</think>\n\n", "yes<|end|>"]
    assert read([row], SHOWS, tmp_path)[0][0] != off
    assert read([row | {"chat_template_kwargs": {"enable_thinking": False}}], SHOWS, tmp_path)[0] == [off]
    config = RunConfig(chat_template=("enable_thinking=false",))
    assert read([row], SHOWS, tmp_path, template=config.template_kwargs)[0] == [off]
    with pytest.raises(ConfigError, match="name=value"):
        RunConfig(chat_template=("enable_thinking",))


def test_tools_and_their_calls(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    row = {
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "messages": [
            {"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "c"}, {"role": "assistant", "content": "cold"},
        ],
    }  # fmt: skip
    for tools in (row["tools"], json.dumps(row["tools"])):
        (found,), skipped = read([row | {"tools": tools}], TOOLS, tmp_path)
        assert not skipped and found[0].startswith('[TOOLS [{"type": "function"')
        assert found[1] == "[weather Oslo]<|end|>" and found[3] == "cold<|end|>"


def test_a_row_that_is_left_out_says_why(tmp_path):
    rows = [{"question": "?", "choices": []}, {"messages": [{"role": "user", "content": "hi"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"text": ""}]  # fmt: skip
    found, skipped = read(rows, tmp_path=tmp_path)
    assert found == [] and skipped.total() == 4
    for words in ("keys: question, choices", "without an answer", "content that is not text", "empty"):
        assert words in str(skipped)
    assert "no template" in str(read([FORMS["messages"]], None, tmp_path)[1])


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def rows_with(system: str, count: int, per_passage: int = 4):
    """Chats that begin alike, about passages of some questions each."""
    rows = []
    for i in range(count):
        asked = f"{words(i // per_passage, 20)}. What of {i}?"
        turns = [("system", system), ("user", asked), ("assistant", f"It is {i}, and that is enough.")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    return rows


def split(rows, tmp_path, kind=RunConfig, **over):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = dataset.read_dataset([str(path)], tokenizer(), SkipCounts(), 300)
    config = kind(**({"max_length": 4000, "min_length": 8} | over))
    return dataset.split_dataset(whole, SkipCounts(), config, 5)


SYSTEM, OTHER = "You are a helpful assistant who answers in plain words. " * 5, "You are terse. " * 30


@pytest.mark.parametrize(("systems", "kind"), [([SYSTEM], RunConfig), ([SYSTEM, OTHER], LmConfig)])
def test_a_system_prompt_of_all_rows_does_not_decide_the_split(systems, kind, tmp_path):
    rows = [row for system in systems for row in rows_with(system, 400 // len(systems))]
    learned, held_out = split(rows, tmp_path, kind, held_out=0.1)
    assert 10 < len(held_out) < 90 and len(learned) + len(held_out) == 400

    def passages(side):
        return {tokenizer().decode(d.token_ids).split(". What of")[0][-60:] for d in side}

    assert not passages(learned) & passages(held_out), "questions about one passage are on both sides"


def test_nothing_held_out_is_an_error(tmp_path):
    with pytest.raises(PromptError, match="held_out=0"):
        split(rows_with("Be good.", 1), tmp_path, held_out=0.001)
    learned, held_out = split(rows_with("Be good.", 12), tmp_path, held_out=0.001)
    assert len(held_out) == 4 and len(learned) == 8  # one of three passages
    learned, held_out = split(rows_with("Be good.", 4), tmp_path, held_out=0.0)
    assert len(learned) == 4 and not len(held_out)


def test_what_else_is_said_can_be_learned_too(tmp_path):
    for learn, context in (("answers", 1), ("all", 0)):
        (document,), _ = split([FORMS["messages"]], tmp_path, learn=learn, held_out=0.0)
        assert (document.loss_mask is None) == (not context)
        assert tokenizer().decode(document.token_ids[: document.start]) == "<|user|>hi<|end|>\n<|assistant|>"


def test_a_servers_thoughts_and_settings_are_kept_in_the_rows(tmp_path):
    pytest.importorskip("openai")
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"object": "list", "data": [{"id": "m", "object": "model"}]})

        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"role": "assistant", "content": "yes", "reasoning_content": "well"}
            usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.reply({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})

        def reply(self, body):
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *words): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file, template = AnswerFile(tmp_path / "answers.jsonl"), {"enable_thinking": True}
    try:
        url, prompts = f"http://127.0.0.1:{server.server_port}", iter([[AnswerPrompt("hi", 0.0)]])
        generate_answers(prompts, file, url, rows=1, batch=1, max_new_tokens=9, template=template)
    finally:
        server.shutdown()
        server.server_close()
    row = json.loads((tmp_path / "answers.jsonl").read_text())
    assert asked[0]["chat_template_kwargs"] == row["chat_template_kwargs"] == template
    assert read([row], DROPS, tmp_path)[0][0][1] == "well\n</think>\n\nyes<|end|>"
