"""Blocks of Python on the pages, and the README's shell commands, run as they stand, on tiny models."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import longdraft
from longdraft import PromptCache, Speculator
from longdraft.cli.main import app
from tests.support.drafts import random_draft
from tests.support.tiny import tiny_model, tiny_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
QUESTION = "why is the sea blue? the sea is blue, the sea is blue"
IDS = torch.tensor([[5, 6, 7, 5, 6, 7]])
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def blocks(page: str, language: str = "python") -> list[str]:
    found = re.findall(r"```(\w*)\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return [text for kind, text in found if kind == language]


README = "../README.md"
COMMANDS = [line for line in "".join(blocks(README, "")).splitlines() if re.search(r"\blongdraft \w", line)]


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", code), names)
    return names


@pytest.fixture
def model():
    return tiny_model(context=1024)


@pytest.fixture
def tokenizer():
    return tiny_tokenizer(chat=True)


@pytest.fixture
def folder(tmp_path, model, tokenizer, monkeypatch):
    """A model's folder, in the place of the embedded model too."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    load = longdraft.load
    monkeypatch.setattr(longdraft, "load", lambda path=None, **more: load(path or tmp_path / "model", **more))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def test_every_block_is_run_here():
    counts = {"transformers.md": 3, "api.md": 1, "suffix.md": 1, "serve.md": 1, "models.md": 2, README: 1}
    assert {page: len(blocks(page)) for page in counts} == counts and len(COMMANDS) >= 3


def test_the_readmes_lines(folder):
    out = run(
        blocks(README)[0],
        AutoModelForCausalLM=AutoModelForCausalLM,
        longdraft=longdraft,
        model_id=folder,
        inputs=INPUTS,
    )["out"]
    assert out.shape == (1, IDS.shape[1] + 8)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readmes_commands(folder, command):
    Path("report.txt").write_text("the rain in spain stays mainly in the plain. " * 3)
    Path("prompts.jsonl").write_text(json.dumps({"text": "one two three one two"}) + "\n")
    source, _, command = command.rpartition("| ")
    words = shlex.split(command)
    assert words.pop(0) == "longdraft"
    extra = {"generate": ["--max-tokens", "8"], "bench": ["--max-tokens", "4"]}.get(words[0], [])
    model = [] if words[0] == "methods" else ["--model", str(folder)]
    piped = Path("report.txt").read_text() if source else None
    result = CliRunner().invoke(app, [*words, *model, *extra], input=piped)
    assert result.exit_code == 0, result.output


def test_many_prompts(model, tokenizer):
    spec = Speculator("prompt-lookup", target=model, tokenizer=tokenizer)
    names = {"spec": spec, "prompts": ["one two", "three", "four"] * 4}
    for code in blocks("batch.md"):
        names = run(code, **names)
        if "results" in code:
            assert all(r.new_tokens for r in names["results"])
    assert len(names["results"]) == 2 and not names["session"].busy


def test_with_transformers(folder, model, capsys):
    first, without, cached = blocks("transformers.md")
    out = run(first, model_id=folder, text=QUESTION)["out"]
    assert torch.equal(out, plain(model, AutoTokenizer.from_pretrained(folder)(QUESTION, return_tensors="pt")))
    names = run(without, longdraft=longdraft)
    assert names["step"].finish_reason and len(names["results"]) == 2
    assert capsys.readouterr().out.endswith(Speculator("ar", model, names["tokenizer"]).generate(
        "Why is the sky blue?", max_new_tokens=8)[0].text)  # fmt: skip
    asked = {"document": "a ship. " * 9, "question_1": "who?", "question_2": "where?"}
    spec = Speculator("prompt-lookup", model, names["tokenizer"])
    names = run(cached, longdraft=longdraft, spec=spec, **asked)
    restored = PromptCache.restored(Path("document.safetensors"), spec.runner().fingerprint)
    (again,) = spec.generate(asked["document"] + "where?", max_new_tokens=2, cache=restored)
    assert again.cached_tokens >= len(asked["document"])


def plain(model: Any, inputs: Any) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=8, do_sample=False)


def test_the_api_and_lookups_in_earlier_requests(folder, model, tokenizer, tmp_path, shipped_in):
    names = run(blocks("api.md")[0], longdraft=longdraft)
    expected = Speculator("ar", model, tokenizer).generate("Why is the sky blue?", max_new_tokens=8)
    assert names["result"].token_ids == expected[0].token_ids
    draft = random_draft(tmp_path / "draft", model)
    code = blocks("suffix.md")[0].replace('"longspec",', '"longspec", draft=draft,')  # a tiny model's is not shipped
    names = run(code, longdraft=longdraft, model=model, tokenizer=tokenizer, draft=draft)
    for spec in (names["spec"], names["both"]):
        found = [spec.generate(QUESTION, max_new_tokens=40)[0] for _ in range(2)]
        assert found[0].token_ids == found[1].token_ids and found[1].accepted > found[0].accepted  # looked up


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_adapters(folder, tmp_path):
    import peft

    for name, seed in (("LEGAL", 1), ("CODE", 2)):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(tiny_model(context=512), lora).save_pretrained(tmp_path / name)
    names = {"PeftModel": peft.PeftModel, "longdraft": longdraft, "Speculator": Speculator, "PromptCache": PromptCache}
    code = blocks("models.md")[0].replace('"BASE"', "BASE")
    found = run(code, **names, BASE=str(folder), ids=IDS[0].tolist())
    own = found["model"].generate(IDS, max_new_tokens=8, do_sample=False)[0, IDS.shape[1] :]
    assert found["result"].token_ids == own.tolist()


def test_the_client_of_the_server(running, capsys):
    """The same lines, but for the address."""
    run(
        blocks("serve.md")[0]
        .replace("http://127.0.0.1:8000", running.url)
        .replace("stream=True", "stream=True, seed=3")
    )
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    found = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none").chat.completions.create(
        model="", messages=messages, seed=3
    )
    assert capsys.readouterr().out == found.choices[0].message.content


def test_an_application_of_ones_own(folder, model, tokenizer):
    """examples/fastapi_app.py, on the tiny model."""
    httpx = pytest.importorskip("httpx")
    import runpy

    app = runpy.run_path(str(DOCS.parent / "examples" / "fastapi_app.py"))["app"]

    async def asked(**query: Any) -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
            return await client.get("/answer", params=query)

    answer = asyncio.run(asked(question="who?", max_new_tokens=12))
    (expected,) = Speculator("ar", model, tokenizer).generate("who?", max_new_tokens=12)
    assert answer.status_code == 200 and answer.text == expected.text
    refused = asyncio.run(asked(question="who?", max_new_tokens=0))
    assert refused.status_code == 400 and "max_new_tokens" in refused.text


def test_make_demo_is_a_command_that_runs(folder, monkeypatch):
    """With what the shell would put into its words."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (DOCS.parent / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    line = recipe[1].replace("\\\n", " ").replace("$$(", "$(").strip().lstrip("@")
    words = shlex.split(re.sub(r"\$\(\$\(BIN\)/python -c '.*?'\)", "textwrap.py", line))
    assert words[:2] == ["$(BIN)/longdraft", "generate"] and {"--compare", "--file", "--prompt"} <= set(words)
    Path("textwrap.py").write_text("def wrap(text):\n    return text\n")
    monkeypatch.setenv("COLUMNS", "60")
    ran = CliRunner().invoke(app, [*words[1:], "--model", str(folder)])
    assert ran.exit_code == 0 and "ar" in ran.output, ran.output
