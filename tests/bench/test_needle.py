"""Needles foreseen, on tiny models: what each view is asked, and what it is told."""

from __future__ import annotations

import json
import math

import pytest
import torch

from longdraft import LoadedModel
from longdraft.bench.needle import RETRIEVED, TARGET, NeedleDrafts, haystacks, view
from longdraft.cli import needle, options
from longdraft.cli.main import main
from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.longspec import LongSpecDraft, LongSpecDrafter
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.errors import ContextError, PromptError
from tests.support.drafts import random_draft, random_eagle3
from tests.support.tiny import tiny_model, tiny_tokenizer

SIZES = {"budget": 48, "sink": 8, "window": 8, "chunk": 8}


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(layers=6, dtype=torch.float64), tiny_tokenizer(chat=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "hay.txt"
    path.write_text("the cat sat on the mat. " * 60)
    return path


@pytest.fixture(scope="module")
def drafts(loaded, tmp_path_factory):
    made = tmp_path_factory.mktemp("drafts")
    random_draft(made / "longspec", loaded.model)
    random_eagle3(made / "eagle3", loaded.model, kept=list(range(5, 50)))
    return {"longspec": LongSpecDraft.load(made / "longspec"), "eagle3": Eagle3Draft.load(made / "eagle3")}


def hay(loaded, text, depth=0.4, context=300):
    (found,) = haystacks(text, context, loaded.tokenizer, (depth,), 1)
    return found


def measured(loaded, text, views, drafts=None, **where):
    found = NeedleDrafts(loaded, views, drafts or {})
    return found, found.measure(hay(loaded, text, **where))["tokens"]


def test_haystacks(loaded, text):
    tokenizer = loaded.tokenizer
    found = haystacks(text, 300, tokenizer, (0.1, 0.8), 2)
    assert [each.sample.needles[0][0] for each in found] == [0.8, 0.1, 0.8, 0.1]  # its beginning serves the next
    assert len({each.sample.answers for each in found}) == 4
    for each in found:
        (depth, _), (code,) = each.sample.needles[0], each.sample.answers
        shown = tokenizer.decode(each.tokens)
        # Its share of the document: the question and the marks of the chat come behind.
        assert 270 <= len(each.tokens) <= 300 and abs(shown.index(code) / shown.index("what is") - depth) < 0.2
        assert shown.rstrip().endswith("door?<eos><assistant>")
    (told,) = haystacks(text, 300, tokenizer, (0.5,), 1, system="the dog is red.")
    assert len(told.tokens) <= 300 and tokenizer.decode(told.tokens).count("the dog is red.") == 1
    for path, context, error in ((text, 5000, PromptError), (text, 20, ContextError), (text / "no", 300, PromptError)):
        with pytest.raises(error):
            haystacks(path, context, tokenizer)


def test_the_target_is_asked_for_each_token_but_the_first(loaded, text):
    """Against transformers' own forward over prompt and needle."""
    asking, found = measured(loaded, text, [])
    one = hay(loaded, text)
    answer, code = asking.answer(one)
    assert loaded.tokenizer.decode(answer) + "." == one.sample.needles[0][1].lower()
    assert (loaded.tokenizer.decode(answer[code:]),) == one.sample.answers
    ids = [*one.tokens, *answer]
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([ids])).logits[0].float()
    start = len(one.tokens)
    expected = [torch.log_softmax(logits[i - 1], -1) for i in range(start + 1, len(ids))]
    got = found[TARGET]
    assert [t.log_prob for t in got] == pytest.approx([x[t].item() for x, t in zip(expected, answer[1:], strict=True)])
    assert [t.right for t in got] == [int(x.argmax()) == t for x, t in zip(expected, answer[1:], strict=True)]
    assert [t.code for t in got] == [False] * (code - 1) + [True] * 5


def test_a_draft_is_judged_by_what_it_proposes(loaded, text, drafts, monkeypatch):
    trees = []
    propose = LongSpecDrafter.propose

    def noted(self, sequences, budget=None):
        trees.extend(found := propose(self, sequences, budget))
        return found

    monkeypatch.setattr(LongSpecDrafter, "propose", noted)
    asking, found = measured(loaded, text, [view("longspec", {})], drafts)
    answer, _ = asking.answer(hay(loaded, text))
    got = found["longspec"]
    assert len(trees) == len(got) == len(answer) - 1
    for tree, token, true, root in zip(trees, got, answer[1:], answer, strict=False):
        assert tree.tokens[0] == root and tree.drafted == 1
        assert token.right == (tree.tokens[1] == true)
        assert token.log_prob is not None and token.log_prob <= tree.log_probs[1] + 1e-5
        assert not token.right or token.log_prob == pytest.approx(tree.log_probs[1], abs=1e-5)


@pytest.mark.slow
def test_the_views_of_a_small_language_model(loaded, text, tmp_path):
    """The target itself, as a draft: with all of the text in view, it foresees what the target does."""
    loaded.model.save_pretrained(tmp_path)
    drafts = {"small-lm": SmallLMDraft.load(tmp_path)}
    sizes = {"sink": 8, "recent": 16, "chunk": 8}
    views = [
        view("full", {}),
        view("streaming", {"sink": 8, "recent": 350}),
        view("retrieval", {**sizes, "chunks": 40}),
        view("streaming", {"sink": 8, "recent": 40}),
        view("retrieval", {**sizes, "chunks": 4, "every": 1}),
        view("specextend", {**sizes, "chunks": 4, "every": 1}),
    ]
    # And the target itself on what it retrieves.
    views += [view(RETRIEVED, {**SIZES, "budget": 512}), view(RETRIEVED, SIZES)]
    _, found = measured(loaded, text, views, drafts)
    target, *rows = ([t.log_prob for t in own] for own in found.values())
    for own in (*rows[:3], rows[6]):
        assert own == pytest.approx(target, abs=1e-5)
    for own in (*rows[3:6], rows[7]):
        assert own != pytest.approx(target, abs=1e-2)
    assert rows[4] == rows[5] and rows[3] != rows[4]


def test_tokens_that_a_draft_does_not_know(loaded, text, drafts):
    """The tiny EAGLE draft's vocabulary ends before some of the digits."""
    asking, found = measured(loaded, text, [view("eagle3", {})], drafts)
    answer, _ = asking.answer(hay(loaded, text))
    known = set(range(5, 50))
    assert [t.log_prob is None for t in found["eagle3"]] == [t not in known for t in answer[1:]]
    row = asking.report([asking.measure(hay(loaded, text))]).document["rows"][1]
    lacking = sum(t not in known for t in answer[1:])
    assert row["lacking"] == lacking and row["view"] == "eagle3"
    assert row["perplexity"] == pytest.approx(
        math.exp(-sum(t.log_prob or 0.0 for t in found["eagle3"]) / (row["tokens"] - lacking))
    )


def test_all_views_share_one_reading_of_the_prompt(loaded, text, drafts, forwards):
    views = [view("longspec", {}), view("eagle3", {}), view(RETRIEVED, SIZES)]
    _, found = measured(loaded, text, views, drafts)
    sizes = [f.rows for f in forwards]
    assert sum(size > 100 for size in sizes) == 1 and all(size == 1 for size in sizes[1:])
    # Alone, one says the same.
    _, own = measured(loaded, text, views[1:2], drafts)
    alone, beside = own["eagle3"], found["eagle3"]
    assert [t.right for t in alone] == [t.right for t in beside]
    assert [t.log_prob or 0 for t in alone] == pytest.approx([t.log_prob or 0 for t in beside])


def test_up_to_the_end_of_the_context(loaded, text):
    asking = NeedleDrafts(loaded, [view(RETRIEVED, SIZES)], {})
    limit = loaded.model.config.max_position_embeddings
    short, longest = asking.contexts([200, limit, limit - 1])
    assert short == 200 and longest == limit - len("the secret code of the yellow door is 100000.") - 2
    assert asking.measure(hay(loaded, text, 0.9, longest))["tokens"][TARGET]
    with pytest.raises(ContextError):
        asking.contexts([200, limit + 1])


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    model = tiny_model(context=512, layers=6)
    model.save_pretrained(made / "model")
    tiny_tokenizer(chat=True).save_pretrained(made / "model")
    random_draft(made / "longspec", model)
    random_eagle3(made / "eagle3", model)
    (made / "hay.txt").write_text("the cat sat on the mat. " * 40)
    return made


@pytest.fixture
def command(folder, capsys):
    def run(*arguments):
        capsys.readouterr()
        words = ["bench", "needle", "--haystack", folder / "hay.txt", "--model", folder / "model", *arguments]
        return main([str(word) for word in words]), *capsys.readouterr()

    yield run
    options.reset_debug()


def test_the_command(command, folder):
    own = f"{RETRIEVED}:budget=48:sink=8:window=8"
    code, out, err = command(
        "--draft", folder / "longspec", "--draft", folder / "eagle3", "--views", f"longspec,eagle3:window=9,{own}",
        "--needle-context", "200,400", "--needle-depths", "0.2,0.8", "--needle-samples", 1, "--json",
    )  # fmt: skip
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    assert [row["view"] for row in report["rows"]] == [TARGET, "longspec", "eagle3:window=9", own] * 2
    assert list(report) == ["rows", "hardware", "versions", "complete"]
    assert list(report["rows"][0]) == [
        "view", "context", "context_tokens", "haystacks", "tokens", "accuracy", "perplexity", "code_tokens",
        "code_accuracy", "code_perplexity", "lacking", "by_depth",
    ]  # fmt: skip
    for row in report["rows"]:
        assert [each["depth"] for each in row["by_depth"]] == [0.2, 0.8] and row["haystacks"] == 2
        assert row["accuracy"] is not None and row["code_tokens"] == 10
    assert [row["context"] for row in report["rows"]] == [200] * 4 + [400] * 4
    assert "code accuracy" in out and "at 0.8" in out and "Run 1 of 16" in err


def test_small_language_models_by_default_and_one_warning(command, tmp_path, caplog):
    tiny_model(context=256, layers=1).save_pretrained(tmp_path)
    code, out, _ = command(
        "--draft", tmp_path, "--needle-context", 300, "--needle-depths", "0.2,0.8", "--needle-samples", 1, "--views",
        "full,streaming:sink=8:recent=32,retrieval:sink=8:recent=8:chunk=8:chunks=8",
    )  # fmt: skip
    assert code == 0 and [line.split()[0] for line in out.splitlines()[2:6]] == [
        TARGET, "full", "streaming:sink=8:recent=32", "retrieval:sink=8:recent=8:chunk=8:chunks=8",
    ]  # fmt: skip
    assert [r.levelname for r in caplog.records if "trained for texts of" in r.message] == ["WARNING"]


def test_what_is_measured_where_nobody_names_views(drafts):
    assert [each.name for each in needle.default_views({})] == ["full", "streaming", "retrieval", RETRIEVED]
    assert [each.name for each in needle.default_views(drafts)] == [
        "longspec", "eagle3", "eagle3:retrieval=True", RETRIEVED,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--views", "blurred"], "blurred"),
        (["--views", "prompt-lookup"], "prompt-lookup"),
        (["--views", "specpv"], "specpv"),
        (["--views", "longspec:colour=1"], "colour"),
        (["--views", "retrieval:depth=2"], "depth"),
        (["--views", f"{RETRIEVED}:colour=1"], "colour"),
        (["--views", ","], "--views"),
        (["--views", "longspec:nodes"], "name=value"),
        (["--needle-context", "long"], "--needle-context"),
        (["--needle-context", "0"], "--needle-context"),
        (["--needle-depths", "2"], "needle-depths"),
        (["--needle-samples", "0"], "needle-samples"),
        (["--draft", "FOLDER", "--draft", "FOLDER"], "longspec"),
        (["--views", "longspec", "--draft", "FOLDER", "--needle-context", "9000"], "--needle-context"),
        (["--views", "longspec", "--draft", "FOLDER", "--needle-context", "20"], "20 tokens"),
        (["--views", "longspec"], "draft"),
    ],
    ids=str,
)
def test_what_the_command_refuses(command, folder, arguments, says):
    code, _, err = command(*(folder / "longspec" if word == "FOLDER" else word for word in arguments))
    assert code == 2 and says in err.splitlines()[-1]
