"""A folder of ``longdraft export --to custom-generate``: transformers decodes with it, and the tokens are its own."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, TextIteratorStreamer, dynamic_module_utils

from longdraft import Speculator
from longdraft.cli.main import main
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.integration import model_folder
from tests.support.drafts import random_eagle3
from tests.support.methods import EXACT, Specs
from tests.support.quick import few
from tests.support.tiny import tiny_folder, tiny_model, tiny_tokenizer

IDS = torch.tensor([[3, 9, 14, 7, 22, 5] * 4])
SETTINGS = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return tiny_folder(folder, layers=5, chat=False)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return random_eagle3(tmp_path_factory.mktemp("draft") / "draft", tiny_model(layers=5), layers=(1, 2, 3))


@pytest.fixture(scope="module")
def exported(tmp_path_factory, target, draft):
    out = tmp_path_factory.mktemp("out") / "model"
    arguments = ["export", draft, out, "--to", "custom-generate", "--verifier", target, "-o", "depth=2"]
    assert main([str(a) for a in [*arguments, "--plan", "fixed"]]) == 0
    return out


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """A folder, in place of the user's cache, that transformers copies the code of folders to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The Speculator's calls: the method, and the draft that it decoded with."""
    found = []
    call = Speculator.__call__

    @functools.wraps(call)  # generate asks for its signature
    def counted(self, *args, **kwargs):
        found.append((self.method.name, self.draft() and str(self.draft().folder)))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Speculator, "__call__", counted)
    return found


def test_a_model_of_the_folder_decodes_with_the_draft(exported, target, calls):
    plain = AutoModelForCausalLM.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    expected = plain.generate(IDS, **SETTINGS)
    assert torch.equal(model.generate(IDS, **SETTINGS), expected)  # by position, which a partial makes a trap
    assert torch.equal(model.generate(inputs=IDS, **SETTINGS), expected)
    assert calls == [("eagle3", str(exported / "draft"))] * 2
    assert len(vars(model)["_longdraft_made"]) == 1
    again = model.generate(IDS, custom_generate=str(exported), trust_remote_code=True, **SETTINGS)
    assert torch.equal(again, expected) and len(calls) == 3
    assert torch.equal(model.generate(IDS, custom_generate=Speculator("ar", target=model), **SETTINGS), expected)
    assert calls[3] == ("ar", None)
    # Without trust it is the model alone.
    assert "generate" not in vars(AutoModelForCausalLM.from_pretrained(exported))


@pytest.mark.parametrize("method", few(EXACT, ("ar", "longspec", "eagle3", "specextend")))
def test_every_method_decodes_as_the_folder_says(specs: Specs, tmp_path, calls, method):
    specs.model.save_pretrained(tmp_path / "target")
    options = specs.options(method)
    draft = options.pop("draft", None)
    model_folder.write(tmp_path / "out", str(tmp_path / "target"), method, draft, options | {"plan": "fixed"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(model.generate(IDS, **SETTINGS), specs.model.generate(IDS, **SETTINGS))
    assert calls == [(method, draft and str(tmp_path / "out" / "draft"))]


def test_another_model_decodes_with_the_folder_where_no_draft_is_needed(tmp_path, exported, target, calls):
    model = AutoModelForCausalLM.from_pretrained(target)
    model_folder.write(tmp_path, str(target), "prompt-lookup")
    expected = model.generate(IDS, **SETTINGS)
    for _ in range(2):
        got = model.generate(IDS, custom_generate=str(tmp_path), trust_remote_code=True, **SETTINGS)
        assert torch.equal(got, expected)
    assert calls == [("prompt-lookup", None)] * 2
    with pytest.raises(CheckpointError, match="draft"):
        model.generate(IDS, custom_generate=str(exported), trust_remote_code=True, **SETTINGS)


def test_streams_and_stop_strings_reach_the_loop(exported):
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    text = tokenizer.decode(model.generate(IDS, **SETTINGS)[0, IDS.shape[1] :])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    model.generate(IDS, streamer=streamer, **SETTINGS)
    assert "".join(streamer) == text
    stopped = model.generate(IDS, stop_strings=text[5], tokenizer=tokenizer, **SETTINGS)
    assert tokenizer.decode(stopped[0, IDS.shape[1] :]) == text[: text.index(text[5]) + 1]


def test_a_model_with_the_folders_loop_can_be_copied(exported):
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    expected = model.generate(IDS, **SETTINGS)
    made = [vars(each)["_longdraft_made"] for each in (copy.deepcopy(model), model)]
    assert not made[0] and not pickle.loads(pickle.dumps(made[1]))
    assert torch.equal(copy.deepcopy(model).generate(IDS, **SETTINGS), expected)


def test_what_the_folder_holds(exported, target):
    code = (exported / "custom_generate" / "generate.py").read_text().splitlines()
    assert code[-1] == "generate = generating(Speculator, 'eagle3', draft='draft', depth=2, plan='fixed')"
    assert len([line for line in code if line]) == 3
    assert (exported / "model.safetensors").resolve() == (target / "model.safetensors").resolve()
    assert not (exported / "config.json").is_symlink() and (exported / "tokenizer.json").is_file()


def test_a_method_without_a_draft_in_the_targets_own_folder(tmp_path, capsys, calls):
    tiny_model().save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").stat()
    assert main(["export", "prompt-lookup", str(tmp_path), "--to", "custom-generate", "--verifier", str(tmp_path)]) == 0
    assert "links" not in capsys.readouterr().err
    after = (tmp_path / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime) == (after.st_ino, after.st_mtime)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    got = model.generate(IDS, **SETTINGS)
    assert torch.equal(got, tiny_model().generate(IDS, **SETTINGS)) and calls == [("prompt-lookup", None)]


def test_a_draft_that_is_not_beside_the_code(tmp_path, exported, target, draft, monkeypatch):
    generate = model_folder.generating(Speculator, "eagle3", draft="draft")
    with pytest.raises(CheckpointError):
        generate(IDS, model=AutoModelForCausalLM.from_pretrained(target), **SETTINGS)
    # Of a model of the hub it is fetched, of the commit that the model is of.
    model = AutoModelForCausalLM.from_pretrained(target)
    model.name_or_path, model.config._commit_hash = "some/model", "abc"
    asked = []
    monkeypatch.setattr(model_folder, "fetched", lambda *of: asked.append(of) or exported)
    assert torch.equal(generate(IDS, model=model, **SETTINGS), tiny_model(layers=5).generate(IDS, **SETTINGS))
    assert asked == [("some/model", ["draft/*"], "abc")]


def test_exports_that_cannot_be(tmp_path, draft, target, capsys):
    with pytest.raises(CheckpointError):
        model_folder.write(draft, str(target), "eagle3", draft)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(CapabilityError):
        model_folder.write(tmp_path / "out", str(tmp_path / "x.gguf"), "ar")
    for arguments, code, message in (
        (["none-such"], 2, "none-such"),
        ([draft, "-o", "depth=0"], 2, "depth"),
        ([draft, "--method", "prompt-lookup"], 2, "no option draft"),
        ([draft, "--verifier", tmp_path], 1, "no config.json"),
    ):
        given = ["export", arguments[0], tmp_path / "out", "--to", "custom-generate", "--verifier", target]
        assert main([str(a) for a in [*given, *arguments[1:]]]) == code
        assert message in capsys.readouterr().err
