"""The quality report on tiny models: texts, drift, needles, and the command."""

from __future__ import annotations

import gc
import itertools
import json
import sys

import pytest
import torch

from longdraft import LoadedModel, Speculator
from longdraft.bench import needle, quality_report
from longdraft.bench.data import Sample, place
from longdraft.bench.drift import Listener, RecordedSpecPV, bucket, drift, exact
from longdraft.bench.needle import Search
from longdraft.bench.prompts import Prompt
from longdraft.bench.quality import FULL, REFERENCE, Quality, Settings
from longdraft.bench.scores import rouge_l
from longdraft.bench.thinking import thoughtful, turn
from longdraft.cli import options
from longdraft.cli.main import main
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.engine.loop import Engine
from longdraft.engine.partial import partial_view
from longdraft.engine.sampler import Sampler, Sampling
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, ContextError, PromptError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.runner import TargetRunner
from tests.drafts import random_draft, random_eagle3
from tests.events import decoded
from tests.tiny import tiny_model, tiny_tokenizer

SIZES = {"sink": 4, "recent": 4, "block": 4}
TEXT = "the cat sat on the mat. the dog sat on the cat. " * 4
PROMPT = [(7 * i * i + 3 * i) % 11 for i in range(90)]


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """One before every run takes longer than a tiny run itself."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512, dtype=torch.float64), tiny_tokenizer(chat=True))


def settings(**over) -> Settings:
    return Settings(**{"budgets": (8,), "margins": (6,), "max_tokens": 40, "ignore_eos": True, "options": SIZES} | over)


def prompt(loaded, text=TEXT, name="cats") -> Prompt:
    sample = Sample(text, "", name, f"{name}.jsonl:1")
    return Prompt(sample, tuple(sample.encode(loaded.tokenizer)))


def drifts(model, view, start=None):
    listener, cache = Listener(TargetRunner(model)), PromptCache()
    schedule = RecordedSpecPV(view, listener, start)
    s = Sequence(0, list(PROMPT), 40, sampler=Sampler(True, Sampling().processors()))
    steps = decoded(Engine(listener, SuffixDrafter(), schedule, cache), [s])
    found = drift(exact(listener, cache, PROMPT, s.output), len(PROMPT), schedule.computed)
    assert len(found) == len(s.output) - 1  # every token but the prefill's, once
    return found, {step.mode for step in steps}


def test_a_partial_cache_that_holds_everything_does_not_drift():
    model = tiny_model(vocab=11, dtype=torch.float64)
    found, modes = drifts(model, partial_view(200, 4, 4, 4, 6), 0)
    assert "partial" in modes and any(d.distance for d in found)
    assert min(min(d.cosines) for d in found) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("selector", ["minmax", "streaming"])
def test_a_small_one_drifts_and_a_full_pass_does_not(selector):
    model = tiny_model(vocab=11, dtype=torch.float64)
    found, _ = drifts(model, partial_view(8, 4, 4, 4, 6, selector))
    full = [d for d in found if not d.distance]
    partial = [d for d in found if d.distance]
    assert full and min(min(d.cosines) for d in full) == pytest.approx(1.0, abs=1e-6)
    assert max(d.cosines[-1] for d in partial) < 1 - 1e-6
    # The distance grows by one a token, from 1 after each full pass.
    assert {1, 2, 3} <= {d.distance for d in partial}
    for before, after in itertools.pairwise(found):
        assert after.distance in (0, before.distance + 1)


def test_layers_that_are_listened_to():
    runner = TargetRunner(tiny_model(layers=8))
    assert Listener(runner).layers == (1, 3, 4, 7)  # EAGLE-3's three, and the last
    assert Listener(TargetRunner(tiny_model(layers=2))).layers == (0, 1)


def test_buckets():
    assert [bucket(d) for d in (0, 1, 2, 3, 4, 5, 8, 9, 17)] == [
        (0, 0), (1, 1), (2, 2), (3, 4), (3, 4), (5, 8), (5, 8), (9, 16), (17, 32),
    ]  # fmt: skip


def test_a_budget_that_covers_the_text_changes_nothing(loaded):
    quality = Quality(loaded, settings(budgets=(400,)))
    found = quality.compare(prompt(loaded))
    report = quality_report.document(quality, [found])
    ar, full, specpv = report["rows"]
    assert (specpv["rouge_l_mean"], specpv["rouge_l_min"], specpv["same_share"], specpv["identical"]) == (1, 1, 1, 1)
    assert specpv["partial_share"] == 0 and specpv["same_tokens"] == 40
    assert (full["reference"], specpv["reference"], ar["reference"]) == (REFERENCE, FULL, None)
    assert full["rouge_l_mean"] == 1.0  # both are exact
    assert [(row["first"], row["last"]) for row in report["drift"]] == [(0, 0)]
    assert report["drift"][0]["cosine_min"] == pytest.approx(1.0, abs=1e-6)


def test_sampled_texts_share_their_random_numbers(loaded):
    quality = Quality(loaded, settings(budgets=(400, 8), temperature=1.0))
    runs = quality.compare(prompt(loaded)).runs
    greedy = Quality(loaded, settings()).compare(prompt(loaded)).runs
    assert runs["full"].tokens == runs["ar"].tokens != greedy["ar"].tokens
    whole, part = quality.variants
    assert runs[whole].tokens == runs["ar"].tokens != runs[part].tokens


def test_an_answer_is_asked_for_behind_a_chain_of_thought(loaded):
    quality = Quality(loaded, settings(answer_tokens=6, drift=False))
    question = Sample(TEXT, "What sat?", "pets", "pets.jsonl:1", answers=("cat",), score="found")
    asked = Prompt(question, tuple(thoughtful(question).encode(loaded.tokenizer)))
    found = quality.compare(asked)
    thought = found.runs["ar"].tokens
    (behind,) = Speculator("ar", loaded.model, loaded.tokenizer).generate(
        [[*asked.tokens, *thought, *turn(loaded.tokenizer)]], max_new_tokens=6
    )
    assert found.answers["ar"] == found.answers["full"] == quality.text(behind.token_ids)
    assert found.scores["ar"] == float("cat" in found.answers["ar"])
    texts = quality_report.document(quality, [found])["texts"]
    assert [(text["text"], text["answer"]) for text in texts[:1]] == [(quality.text(thought), found.answers["ar"])]
    with pytest.raises(ValueError, match="answer-tokens must be at least 0"):
        settings(answer_tokens=-1)


def test_each_combination_is_a_row_on_one_read_prompt(loaded):
    wanted = settings(budgets=(8, 16, 8), margins=(4, 8), selectors=("minmax", "streaming"), drift=False)
    quality = Quality(loaded, wanted)
    seen: list[str] = []
    found = quality.compare(prompt(loaded), seen.append)
    assert seen == quality.names and quality.drafter == "prompt-lookup"
    rows = quality_report.document(quality, [found])["rows"]
    assert [(r["method"], r["selector"], r["budget"], r["margin"]) for r in rows] == [
        ("ar", None, None, None), ("full", None, None, None),
        ("specpv", "minmax", 8, 4), ("specpv", "minmax", 8, 8),
        ("specpv", "minmax", 16, 4), ("specpv", "minmax", 16, 8),
        ("specpv", "streaming", None, 4), ("specpv", "streaming", None, 8),
    ]  # fmt: skip
    assert all(0 < r["partial_share"] < 1 and r["speedup_vs_full"] > 0 for r in rows[2:])
    # What listens does not disturb, and what was kept of the prompt is right.
    spec = Speculator("specpv", loaded.model, loaded.tokenizer, budget=16, margin=4, **SIZES)
    (alone,) = spec.generate(list(prompt(loaded).tokens), max_new_tokens=40, eos_token_ids=[])
    assert list(found.runs["specpv:selector=minmax:budget=16:margin=4"].tokens) == alone.token_ids


@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_a_trained_draft_serves_all_and_the_prompt_is_read_once(kind, tmp_path, forwards):
    model = tiny_model(layers=8, context=512, dtype=torch.float64)
    draft = (random_draft if kind == "longspec" else random_eagle3)(tmp_path, model)
    tree = {"widths": (2, 2)} if kind == "longspec" else {"depth": 2, "top_k": 2, "nodes": 4}
    wanted = settings(budgets=(8, 16), margins=(6, 9), max_tokens=24, options={**SIZES, **tree, "draft": draft})
    quality = Quality(LoadedModel(model, tiny_tokenizer(chat=True)), wanted)
    assert quality.drafter == kind
    one = prompt(LoadedModel(model, tiny_tokenizer(chat=True)))
    found = quality.compare(one)
    assert sum(f.rows >= len(one.tokens) - 1 for f in forwards) == 1
    assert found.runs[FULL].tokens == found.runs[REFERENCE].tokens
    assert all(run.partial_rounds for name, run in found.runs.items() if name in quality.variants)
    tokens = [d for name in quality.variants for d in found.drifts[name]]
    assert len(tokens) == 4 * 23 and {len(d.cosines) for d in tokens} == {4}
    assert min(min(d.cosines) for d in tokens if not d.distance) == pytest.approx(1.0, abs=1e-6)


def test_recording_does_not_change_a_run(loaded):
    with_drift, without = (Quality(loaded, settings(drift=on)).compare(prompt(loaded)) for on in (True, False))
    assert with_drift.drifts and not without.drifts
    assert {n: r.tokens for n, r in with_drift.runs.items()} == {n: r.tokens for n, r in without.runs.items()}


def test_a_cache_larger_than_every_text_is_refused(loaded):
    quality = Quality(loaded, settings(budgets=(8, 64)))
    assert list(quality.cut([60, 100]).values()) == [2, 1]
    with pytest.raises(ContextError, match="--budget"):
        quality.cut([60, 50])


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"budgets": (6,)}, "multiple of block"),
        ({"margins": (0,)}, "margin must be a whole number of at least 1"),
        ({"selectors": ("best",)}, "selector must be"),
        ({"margins": ()}, "margins must name one"),
        ({"max_tokens": 1}, "max-tokens"),
        ({"options": {"budget": 8}}, "--budget, which takes several"),
        ({"options": {"colour": 8}}, "no option colour"),
    ],
)
def test_settings_are_checked(over, message):
    with pytest.raises(ValueError, match=message):
        settings(**over)


def test_rouge():
    score = rouge_l()
    assert score("the cats sat", "the cats sat") == 1.0
    assert score("你好", "你好") == 1.0
    assert score("cats sat here", "a cat sat here") == pytest.approx(6 / 7)  # cats and cat share a stem
    assert score("one two", "") == 0.0


def test_without_rouge_score(monkeypatch, command, folder):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(CapabilityError, match=r"longdraft\[bench\]"):
        rouge_l()
    code, _, err = command("--data", folder / "rows.jsonl")
    assert code == 2 and len(err.splitlines()) == 1  # said before the model is loaded
    # Needles need none.
    assert command("--needle", folder / "hay.txt", "--needle-context", 300, "--needle-depths", "0.5")[0] == 0


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_a_needle_lies_where_it_was_asked_for(depth):
    text = "one two three. " * 100
    hay = place(text, [(depth, "NEEDLE")])
    assert hay.replace("NEEDLE ", "") == text
    assert abs(hay.index("NEEDLE") / len(text) - depth) < 0.02
    assert hay[: hay.index("NEEDLE")].endswith(". ")


def test_a_needle_at_the_end_and_in_text_without_sentences():
    assert place("one two.", [(1.0, "NEEDLE")]) == "one two. NEEDLE"
    assert place("one two three", [(0.3, "NEEDLE")]) == "one two NEEDLE three"
    assert place("onetwothree", [(0.3, "NEEDLE")]) == "onetwothree NEEDLE"


@pytest.mark.parametrize(
    ("answer", "right"),
    [("The code is 48213.", True), ("48,213", True), ("1 or 48213", False), ("482134", False), ("none", False)],
)
def test_answers(answer, right):
    assert needle.found(answer, "48213") is right


def test_haystacks(tmp_path):
    tokenizer, path = tiny_tokenizer(chat=True), tmp_path / "hay.txt"
    path.write_text("the cat sat on the mat. " * 40)
    found = needle.haystacks(Search(path, (0.1, 0.8), 300, 2), tokenizer)
    assert [h.depth for h in found] == [0.8, 0.1, 0.8, 0.1]  # the deepest first: its beginning serves the next
    assert len({h.needle.code for h in found}) == 4
    for h in found:
        text = tokenizer.decode(h.tokens)
        assert 270 <= len(h.tokens) <= 300
        # Its share of the document: the question and the marks of the chat come behind.
        assert abs(text.index(h.needle.code) / text.index("what is") - h.depth) < 0.2
        assert text.rstrip().endswith("door?<eos><assistant>")
    told = needle.haystacks(Search(path, (0.5,), 300, 1, asked={"system": "the dog is red."}), tokenizer)
    assert len(told[0].tokens) <= 300 and tokenizer.decode(told[0].tokens).count("the dog is red.") == 1
    jsonl = tmp_path / "hay.jsonl"
    jsonl.write_text("".join(json.dumps({"text": "the dog sat. " * 20}) + "\n" for _ in range(3)))
    assert len(needle.haystacks(Search(jsonl, (0.5,), 300, 1), tokenizer)) == 1
    with pytest.raises(PromptError):
        needle.haystacks(Search(path, (0.5,), 5000), tokenizer)
    with pytest.raises(ContextError):
        needle.haystacks(Search(path, (0.5,), 50), tokenizer)
    with pytest.raises(PromptError):
        needle.haystacks(Search(tmp_path / "none.txt"), tokenizer)


def test_several_needles_and_a_chain_of_variables(tmp_path):
    tokenizer, path = tiny_tokenizer(chat=True), tmp_path / "hay.txt"
    path.write_text("the cat sat on the mat. " * 60)
    found = needle.haystacks(Search(path, (0.1, 0.4, 0.8), 600, 1, ("several", "tracking")), tokenizer)
    assert [h.kind for h in found] == ["several"] * 3 + ["tracking"]
    several, tracking = found[:3], found[3]
    for h in several:  # all needles lie in each, at their depths
        text = tokenizer.decode(h.tokens)
        at = [text.index(each.needle.code) / text.index("what is") for each in several]
        assert at == pytest.approx([0.8, 0.4, 0.1], abs=0.2)
        assert h.score(f"It is {h.needle.code}.") == 1.0 and h.score("It is 1.") == 0.0
    assert len({h.needle.code for h in several}) == 3 and len(tracking.needle.names) == 3
    first, second, third = tracking.needle.names
    text = tokenizer.decode(tracking.tokens).lower()
    order = [text.index(f"{name.lower()} =") for name in tracking.needle.names]
    assert order == sorted(order)
    assert tracking.score(f"{first}, {second} and {third}") == 1.0
    assert tracking.score(f"{first} X{second}") == pytest.approx(1 / 3)
    for over, message in (({"kinds": ("all",)}, "single, several, tracking"), ({"kinds": ()}, "none")):
        with pytest.raises(ValueError, match=message):
            Search(path, **over)
    with pytest.raises(ValueError, match="depths"):
        Search(path, tuple(i / 10 for i in range(7)), kinds=("several",))


def test_rounded_kv_is_compared_with_plain_decoding(tmp_path):
    loaded = LoadedModel(tiny_model(context=512), tiny_tokenizer(chat=True))
    quality = Quality(loaded, settings(kv_dtypes=("int8",), drift=False))
    name = "ar:kv_dtype=int8"
    assert quality.approximate[-1] == name and quality.reference(name) == "ar"
    found = quality.compare(prompt(loaded))
    assert set(found.runs) == {*quality.names} and found.runs[name].partial_rounds == 0
    # Its text is not always another one; what the exact target thinks of it is computed all the same.
    assert found.runs["ar"].surprise == pytest.approx(found.runs["full"].surprise)
    assert found.runs[name].surprise > 0
    path = tmp_path / "hay.txt"
    path.write_text("the cat sat on the mat. " * 40)
    hay = needle.haystacks(Search(path, (0.5,), 300, 1), loaded.tokenizer)
    assert quality.searched(hay)[-1] == name
    answered = quality.search(hay[0], quality.searched(hay))
    assert set(answered.right) == {*quality.searched(hay)}
    with pytest.raises(ValueError, match="kv-dtype"):
        settings(kv_dtypes=("int4",))


def test_surprise_is_what_the_target_says_of_each_token(loaded):
    runner, text = Listener(TargetRunner(loaded.model)), [3, 5, 7, 9, 4, 6, 8]
    with torch.inference_mode():
        said = loaded.model(torch.tensor([text])).logits[0].float().log_softmax(-1)
    for prompt_tokens in (1, 3):
        wanted = -sum(float(said[i - 1, text[i]]) for i in range(prompt_tokens, len(text)))
        found = exact(runner, PromptCache(), text[:prompt_tokens], text[prompt_tokens:]).surprise
        assert found == pytest.approx(wanted / (len(text) - prompt_tokens))


def test_needles_are_asked_of_those_that_cut_the_haystack(loaded, tmp_path):
    path = tmp_path / "hay.txt"
    path.write_text("the cat sat on the mat. " * 40)
    hay = needle.haystacks(Search(path, (0.5,), 300, 1), loaded.tokenizer)
    quality = Quality(loaded, settings(budgets=(8, 400), margins=(4, 8)))
    asked = quality.searched(hay)
    assert asked == ["ar", "full", "specpv:selector=minmax:budget=8:margin=4"]
    answered = [quality.search(h, asked) for h in hay]
    rows = quality_report.document(quality, [], asked, answered)["needle"]
    assert [row["asked"] for row in rows] == [1, 1, 1]
    assert rows[0]["found"] == rows[1]["found"]
    with pytest.raises(ContextError):
        Quality(loaded, settings(budgets=(400,))).searched(hay)


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    tiny_model(context=512).save_pretrained(made)
    tiny_tokenizer(chat=True).save_pretrained(made)
    (made / "rows.jsonl").write_text(json.dumps({"text": TEXT}) + "\n" + json.dumps({"text": "short"}) + "\n")
    (made / "hay.txt").write_text("the cat sat on the mat. " * 40)
    return made


@pytest.fixture
def command(folder, capsys):
    def run(*arguments):
        capsys.readouterr()
        sizes = [word for name, size in SIZES.items() for word in ("-o", f"{name}={size}")]
        given = ("--model", folder, "--budget", "8,32", "--margin", "6", "-n", 24)
        words = ["bench", "quality", *given, *sizes, *arguments]
        return main([str(word) for word in words]), *capsys.readouterr()

    yield run
    options.reset_debug()


ROW = [
    "method", "selector", "budget", "margin", "dataset", "context_tokens", "samples", "reference", "rouge_l_mean",
    "rouge_l_min", "same_tokens", "same_share", "identical", "surprise", "tokens_per_second", "speedup_vs_full",
    "mean_accepted_length", "partial_share", "scored", "score", "view",
]  # fmt: skip


def test_bench_quality(command, folder):
    needles = ("--needle", folder / "hay.txt", "--needle-context", 300, "--needle-depths", "0.2,0.8")
    code, out, err = command("--data", folder / "rows.jsonl", "--ignore-eos", "--json", *needles)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert list(found) == ["drafter", "layers", "rows", "drift", "needle", "texts", "hardware", "versions"]
    assert [r["method"] for r in found["rows"]] == ["ar", "full", "specpv", "specpv"]
    assert list(found["rows"][0]) == ROW
    assert found["rows"][0]["samples"] == 2
    texts = {t["method"]: t for t in found["texts"]}
    assert len(found["texts"]) == 8 and texts["ar"]["text"] == texts["full"]["reference_text"]
    assert set(found["drift"][0]) == {
        "method", "selector", "budget", "margin", "dataset", "first", "last", "tokens", "cosine", "cosine_min",
    }  # fmt: skip
    assert list(found["drift"][0]["cosine"]) == [str(layer) for layer in found["layers"]]
    assert [(n["method"], n["budget"], n["asked"]) for n in found["needle"]] == [
        ("ar", None, 4), ("full", None, 4), ("specpv", 8, 4), ("specpv", 32, 4),
    ]  # fmt: skip
    assert [each["depth"] for each in found["needle"][0]["by_depth"]] == [0.2, 0.8]
    titles = ("rows: 2 samples", "drafts by prompt-lookup", "drift by layer", "needle, single: 4 asked")
    assert all(title in out for title in titles)
    assert "1 of 2 prompts fit its partial cache whole" in err
    assert "Run 1 of 24" in err  # 2 prompts x 4 contenders, 4 haystacks x 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to do"),
        (["--budget", "few"], "--budget takes whole numbers"),
        (["--budget", "7"], "multiple of block"),
        (["--budget", ""], "budgets must name one"),
        (["--selector", "best"], "selector must be"),
        (["--drafter", "none"], "drafter must be one of"),
        (["-o", "colour=1"], "no option colour"),
        (["--budget", "400"], "every round would be full"),
        (["--context", "3"], "fits 3 tokens"),
        (["--needle-depths", "2", "--needle", "hay.txt"], "between 0 and 1"),
        (["--needle", "no.txt"], "no file no.txt"),
    ],
)
def test_bench_quality_refuses(command, folder, arguments, message):
    data = ["--data", folder / "rows.jsonl"] if arguments else []
    code, _, err = command(*data, *arguments)
    assert code == 2
    assert message in err.splitlines()[-1]


def test_ctrl_c(command, folder, press_ctrl_c):
    press_ctrl_c(Quality, "compare")
    code, _, err = command("--data", folder / "rows.jsonl")
    assert code == 130 and err.splitlines()[-1] == "Aborted."
