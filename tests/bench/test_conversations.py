"""SPEED-Bench, OpenAI's MRCR and agents' trajectories, in files of their layouts."""

from __future__ import annotations

import json

import pytest

from longdraft.bench import scores, tasks
from longdraft.bench.data import encode_truncated
from longdraft.bench.prompts import encode_prompts, make_batches, prompts_of_length
from longdraft.bench.run import Bench
from longdraft.errors import ContextError, PromptError
from tests.bench.measuring import measured, settings
from tests.support.tiny import tiny_tokenizer

datasets = pytest.importorskip("datasets")
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nTranslate: {question}"


def speed(category, *turns):
    return {"question_id": "0" * 32, "category": category, "sub_category": "x", "turns": list(turns), "source": "s",
            "src_id": "1", "difficulty": "easy", "multiturn": len(turns) > 1}  # fmt: skip


CALL = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
DONE = [
    {"role": "system", "content": "you are an agent"}, {"role": "user", "content": "mend it"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.py b.py"}]},
    {"role": "assistant", "content": "mended."},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_speed_bench(tmp_path, suffix):
    """A folder as prepare_data.py writes it: a file for each split."""
    splits = {"qualitative": speed("coding", "write", "now faster"), "throughput_8k": speed("low_entropy", "long")}
    for split, row in splits.items():
        (tmp_path / split).mkdir()
        path = tmp_path / split / f"test.{suffix}"
        datasets.Dataset.from_list([row]).to_parquet(path) if suffix == "parquet" else lines(path, row)
    found = tasks.load_samples([f"speed-bench={tmp_path}"])
    assert [(s.dataset, s.text) for s in found] == [
        ("speed-bench/coding", "write"), ("speed-bench/throughput_8k/low_entropy", "long"),
    ]  # fmt: skip
    messages = {"question_id": "0" * 32, "category": "math", "messages": [{"role": "user", "content": "2 + 2"}]}
    (one,) = tasks.load_samples([f"speed-bench={lines(tmp_path / 'qualitative.jsonl', messages)}"])
    assert (one.dataset, one.text) == ("speed-bench/math", "2 + 2")


def test_mrcr(tmp_path):
    messages = [{"role": "assistant" if i % 2 else "user", "content": f"turn {i}"} for i in range(6)]
    row = {
        "prompt": json.dumps([*messages, {"role": "user", "content": "prepend aYooSG8CQg to turn 3"}]),
        "answer": "aYooSG8CQgturn 3", "random_string_to_prepend": "aYooSG8CQg", "n_needles": 2,
    }  # fmt: skip
    (tmp_path / "2needle").mkdir()
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "2needle" / "2needle_0.parquet")
    (sample,) = tasks.load_samples([f"mrcr={tmp_path}"])
    assert sample.dataset == "mrcr/2needle" and len(sample.messages) == 7
    expected = {"aYooSG8CQgturn 3": 1.0, "aYooSG8CQgturn 5": 2 * 5 / 12, "turn 3": 0.0, " aYooSG8CQgturn 3": 0.0}
    assert {text: scores.score_answer(sample, text) for text in expected} == expected
    with pytest.raises(PromptError, match="random_string_to_prepend"):
        tasks.load_samples([f"mrcr={lines(tmp_path / 'short.jsonl', {**row, 'random_string_to_prepend': None})}"])


def test_texts_that_speed_bench_may_not_publish_are_no_prompts(tmp_path):
    path = lines(tmp_path / "rows.jsonl", speed("coding", "write"), speed("multilingual", MASKED))
    with pytest.raises(PromptError, match=r"rows.jsonl:2.*prepare_data"):
        tasks.load_samples([f"speed-bench={path}"])
    assert len(tasks.load_samples([f"speed-bench={path}"], 1)) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"messages": DONE, "tools": TOOLS},
        {"trajectory": DONE, "tools": json.dumps(TOOLS)},
        {"turns": DONE, "extras": json.dumps({"tools": json.dumps(TOOLS)}), "question_id": "1", "category": "agent"},
    ],
    ids=["OpenAI's", "SWE-rebench's", "SPEED-Bench's"],
)
def test_every_answer_of_an_agent_is_a_sample(tmp_path, row):
    path = lines(tmp_path / "runs.jsonl", row)
    first, second = tasks.load_samples([f"trajectories={path}"])
    assert [m["role"] for m in first.messages] == ["system", "user"]
    assert second.messages[:2] == first.messages and second.messages[-1]["content"] == "a.py b.py"
    assert second.messages[2]["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}  # as templates want them
    assert (first.origin, second.origin) == (f"{path}:1.1", f"{path}:1.2")
    assert not first.continues_previous and second.continues_previous and second.tools == TOOLS


def test_a_chat_template_gets_the_messages_and_the_tools(tmp_path):
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% for m in messages %}({{ m.role }}) "
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.command }}{% endfor %}{% endfor %}"
    )
    found = tasks.load_samples([f"trajectories={lines(tmp_path / 'runs.jsonl', {'messages': DONE, 'tools': TOOLS})}"])
    shown = [tokenizer.decode(sample.encode(tokenizer, system="not mine")) for sample in found]
    assert shown[0] == "(run)(system) you are an agent(user) mend it"
    assert shown[1] == shown[0] + "(assistant) ls(tool) a.py b.py"


def test_a_long_conversation_loses_whole_messages(tmp_path):
    tokenizer = tiny_tokenizer(chat=True)
    said = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(8)]
    sample = tasks.load_samples([f"trajectories={lines(tmp_path / 'rows.jsonl', {'messages': said})}"])[-1]
    whole = sample.encode(tokenizer)
    cut = encode_truncated(sample, tokenizer, len(whole) - 1)
    assert len(cut) < len(whole) - len("turn 5") and cut[-9:] == whole[-9:] and cut[:9] == whole[:9]
    with pytest.raises(ContextError, match=r"rows.jsonl:1"):
        encode_truncated(sample, tokenizer, 5)
    found, notes = prompts_of_length([sample], 50, 500, tokenizer, "join")
    assert len(found) == 1 and len(found[0].token_ids) <= 50 and not found[0].joined and not notes


@pytest.mark.parametrize(
    "row",
    [{"text": "x"}, {"messages": "x"}, {"messages": [{"content": "x"}]}, {"messages": DONE[:2]}, {"turns": ["x"]}],
)
def test_rows_without_turns_are_named(tmp_path, row):
    with pytest.raises(PromptError, match=r"runs.jsonl:1"):
        tasks.load_samples([f"trajectories={lines(tmp_path / 'runs.jsonl', row)}"])


def test_a_turn_starts_from_what_the_turn_before_has_read(tmp_path, loaded):
    path = lines(tmp_path / "runs.jsonl", {"messages": DONE}, {"messages": DONE[1:]})
    samples = tasks.load_samples([f"trajectories={path}"])
    asked = {"methods": ("prompt-lookup",), "ignore_eos": True, "max_tokens": 40, "plan": "fixed"}
    wanted = settings(**asked, cold=False)
    bench, kept, caches = Bench(loaded, wanted), [], []
    for group in make_batches(encode_prompts(samples, loaded, wanted), (1,))[0]:
        kept.append(bench.measure(group))
        caches.append(bench.methods["ar"].prefill.cache)
    assert [m.samples for m in kept] == [(f"{path}:{line}.{turn}",) for line in (1, 2) for turn in (1, 2)]
    assert caches[0] is caches[1] is not caches[2] is caches[3]  # each trajectory begins with nothing
    assert len(caches[3].tokens[0]) >= kept[3].prompt_tokens[0]
    _, anew = measured(loaded, settings(**asked), samples)
    for own, other in zip(kept, anew, strict=True):
        assert own.rounds["prompt-lookup"][0].tokens == other.rounds["prompt-lookup"][0].tokens
        assert not own.differences
    pairs = [pair for m in kept for pair in m.rounds["prompt-lookup"][0].accepted]
    assert any(accepted for accepted, _ in pairs) and any(not accepted for accepted, _ in pairs)
