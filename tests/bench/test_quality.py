"""``longdraft bench quality`` on tiny models: outputs against their references, and refused options."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from longdraft import LoadedModel, Speculator
from longdraft.bench.data import Sample
from longdraft.bench.prompts import Prompt
from longdraft.bench.quality import FULL, QualityBench, QualitySettings, make_variants
from longdraft.bench.thinking import answer_turn, with_thinking
from longdraft.cli import options
from longdraft.cli.main import main
from tests.support.drafts import random_draft, random_eagle3
from tests.support.tiny import tiny_model, tiny_tokenizer

SIZES = {"sink": 4, "recent": 4, "block": 4}
TEXT = "the cat sat on the mat. the dog sat on the cat. " * 4
ROW = {
    "method", "selector", "budget", "margin", "dataset", "context_tokens", "reference", "samples", "rouge_l_mean",
    "rouge_l_min", "same_tokens", "same_share", "identical", "surprise", "tokens_per_second", "mean_accepted_length",
    "prompts", "standard_error", "partial_share", "score", "view", "speedup_vs_full", "scored",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512), tiny_tokenizer(chat=True))


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    loaded.model.save_pretrained(made)
    loaded.tokenizer.save_pretrained(made)
    (made / "rows.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (made / "short.jsonl").write_text(json.dumps({"text": "short"}) + "\n")
    return made


@pytest.fixture
def command(folder, capsys):
    def run(*arguments, budget="8,32", data=("rows",)):
        capsys.readouterr()
        sizes = [word for name, size in SIZES.items() for word in ("-o", f"{name}={size}")]
        files = [word for name in data for word in ("--data", folder / f"{name}.jsonl")]
        given = ("--model", folder, "--budget", budget, "--margin", "6", "-n", 24, "--json", *files)
        words = ["bench", "quality", *given, *sizes, *arguments]
        return main([str(word) for word in words]), *capsys.readouterr()

    yield run
    options.reset_debug()


@pytest.fixture
def report(command):
    """The JSON object of a run that ends well."""

    def run(*arguments, **given):
        code, out, err = command("--ignore-eos", *arguments, **given)
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    return run


def texts(found):
    return {text["method"]: text["text"] for text in found["texts"]}


def test_rows_and_texts(command):
    """Two prompts; the short one fits the partial cache, so that its output is exact."""
    code, out, err = command("--ignore-eos", data=("rows", "short"))
    assert code == 0 and "drafts by prompt-lookup" in out and "1 of 2 prompts fit" in err and "0 of 8 runs" in err
    found = json.loads(out.splitlines()[-1])
    assert {*found} == {"drafter", "rows", "texts", "hardware", "versions", "complete"} and {*found["rows"][0]} == ROW
    assert [(r["dataset"], r["method"], r["budget"]) for r in found["rows"]] == [
        (data, *contender)
        for data in ("rows", "short")
        for contender in (("ar", None), ("full", None), ("specpv", 8), ("specpv", 32))
    ]
    plain, full, part = found["rows"][:3]
    assert (full["reference"], plain["reference"], part["reference"]) == ("ar", None, "full")
    assert (full["rouge_l_mean"], full["identical"], full["same_tokens"]) == (1, 1, 24)  # both are exact
    assert 1 < full["mean_accepted_length"] < 3 and 0 < part["partial_share"] < 1 and part["speedup_vs_full"] > 0
    whole = found["rows"][7]
    assert (whole["rouge_l_min"], whole["same_share"], whole["identical"], whole["partial_share"]) == (1, 1, 1, 0)
    by_name = {text["method"]: text for text in found["texts"][:4]}
    assert by_name["full"]["reference_text"] == by_name["ar"]["text"] and by_name["ar"]["answer"] is None


def test_each_combination_is_a_row_and_its_text_that_of_the_method(report, loaded):
    found = report("--margin", "4,8", "--selector", "minmax,streaming", budget="8,16,8")
    assert [(r["selector"], r["budget"], r["margin"]) for r in found["rows"][2:]] == [
        ("minmax", 8, 4), ("minmax", 8, 8), ("minmax", 16, 4), ("minmax", 16, 8),
        ("streaming", None, 4), ("streaming", None, 8),
    ]  # fmt: skip
    spec = Speculator("specpv", loaded.model, loaded.tokenizer, budget=16, margin=4, **SIZES)
    prompt = Sample(TEXT, "", "", "").encode(loaded.tokenizer)
    (alone,) = spec.generate(prompt, max_new_tokens=24, eos_token_ids=[])
    assert texts(found)["specpv:selector=minmax:budget=16:margin=4"] == alone.text


@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_a_trained_draft_serves_all_and_the_prompt_is_read_once(kind, tmp_path, forwards):
    model = tiny_model(layers=8, context=512)
    draft = (random_draft if kind == "longspec" else random_eagle3)(tmp_path, model)
    tree = {"widths": (2, 2)} if kind == "longspec" else {"depth": 2, "top_k": 2, "nodes": 4}
    wanted = QualitySettings(
        make_variants((8, 16), (6, 9), ("minmax",)), 24, True, options={**SIZES, **tree, "draft": draft}
    )
    quality = QualityBench(LoadedModel(model, tiny_tokenizer(chat=True)), wanted)
    sample = Sample(TEXT, "", "cats", "cats.jsonl:1")
    one = Prompt(sample, tuple(sample.encode(tiny_tokenizer(chat=True))))
    runs = quality.measure(one)["runs"]
    assert quality.drafter == kind and sum(f.rows >= len(one.token_ids) - 1 for f in forwards) == 1
    assert runs[FULL]["text"] == runs["ar"]["text"]
    assert len(wanted.variants) == 4 and all(runs[name]["partial_rounds"] for name in wanted.variants)


def test_the_surprise_is_what_the_model_says_of_each_token(loaded):
    wanted = QualitySettings(make_variants((8,), (6,), ("minmax",)), 40, True, options=SIZES)
    sample = Sample(TEXT, "What sat?", "pets", "pets.jsonl:1", answers=("cat",), metric="found")
    asked = Prompt(sample, tuple(sample.encode(loaded.tokenizer)))
    runs = QualityBench(loaded, wanted).measure(asked)["runs"]
    plain = Speculator("ar", loaded.model, loaded.tokenizer)
    (text,) = plain.generate(list(asked.token_ids), max_new_tokens=40, eos_token_ids=[])
    assert runs["ar"]["text"] == text.text and runs["ar"]["score"] == float("cat" in text.text)
    ids = torch.tensor([[*asked.token_ids, *text.token_ids]])
    with torch.inference_mode():
        said = loaded.model(ids).logits[0, -41:-1].float().log_softmax(-1)
    expected = -said.gather(1, ids[0, -40:, None]).mean().item()
    assert runs["ar"]["surprise"] == pytest.approx(expected, rel=1e-4)
    assert runs["full"]["surprise"] == pytest.approx(expected, rel=1e-4)


def test_sampled_texts_share_their_random_numbers_and_rounded_kv_is_compared_with_plain_decoding(report):
    found = report("-t", 1, "--kv-dtype", "int8", budget="8")
    sampled = texts(found)
    part = next(name for name in sampled if name.startswith("specpv"))
    assert sampled["full"] == sampled["ar"] != sampled[part]
    rounded = found["rows"][-1]
    assert (rounded["method"], rounded["reference"], rounded["partial_share"]) == ("ar:kv_dtype=int8", "ar", 0)
    assert rounded["surprise"] > 0 and rounded["view"] is None


def test_without_rouge_score(monkeypatch, command):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    code, _, err = command()
    assert code == 2 and "longdraft[bench]" in err and len(err.splitlines()) == 1  # said before the model is loaded


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--budget", "few"], "--budget"),
        (["--budget", "7"], "block"),
        (["--budget", ""], "budgets"),
        (["--margin", "0"], "margin"),
        (["--selector", "best"], "selector"),
        (["--drafter", "none"], "drafter"),
        (["-o", "colour=1"], "colour"),
        (["-o", "budget=8"], "--budget"),
        (["-n", "1"], "max-tokens"),
        (["--kv-dtype", "int3"], "kv-dtype"),
        (["--context", "3"], "3 tokens"),
    ],
)
def test_what_is_refused(command, arguments, names):
    code, _, err = command(*arguments)
    assert code == 2 and names in err.splitlines()[-1]


def test_a_run_that_was_stopped_goes_on(command, press_ctrl_c, tmp_path):
    given = ("--results", tmp_path / "q.jsonl", "--markdown", tmp_path / "q.md")
    press_ctrl_c(QualityBench, "measure", 2)
    code, out, err = command(*given, data=("rows", "short"))
    assert code == 130 and "Stopped after 1 of 2" in err and not json.loads(out.splitlines()[-1])["complete"]
    code, out, err = command(*given, data=("rows", "short"))
    assert code == 0 and "1 prompts are in" in err and (tmp_path / "q.md").read_text().count("drafts by") == 2
    assert {row["dataset"] for row in json.loads(out.splitlines()[-1])["rows"]} == {"rows", "short"}
    assert command(*given, "-t", 1)[0] == 2  # other settings


def test_an_answer_is_asked_for_after_a_chain_of_thought(loaded):
    question = Sample(TEXT, "What sat?", "pets", "pets.jsonl:1", answers=("cat",), metric="found")
    prompt = Prompt(question, tuple(with_thinking(question).encode(loaded.tokenizer)))
    options = {"drafter": "prompt-lookup", **SIZES}
    settings = QualitySettings(make_variants([8], [6], ["minmax"]), 24, True, options=options, answer_tokens=6)
    run = QualityBench(loaded, settings).measure(prompt)["runs"]["ar"]
    plain = Speculator("ar", loaded.model, loaded.tokenizer)
    (thought,) = plain.generate([list(prompt.token_ids)], max_new_tokens=24, eos_token_ids=[])
    tokens = thought.token_ids[:-1] if thought.token_ids[-1] in plain.runner().eos_token_ids else thought.token_ids
    (answer,) = plain.generate([[*prompt.token_ids, *tokens, *answer_turn(loaded.tokenizer)]], max_new_tokens=6)
    assert (run["text"], run["answer"]) == (thought.text, answer.text) and run["score"] == float("cat" in answer.text)
    with pytest.raises(ValueError, match="answer-tokens"):
        QualitySettings(make_variants([8], [6], ["minmax"]), options=options, answer_tokens=-1)
