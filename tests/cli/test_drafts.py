"""Drafts on the command line: generate, bench, doctor."""

from __future__ import annotations

import json

import pytest

from tests.support.drafts import published_eagle3, random_draft, random_eagle3
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_model


def last(ended):
    return json.loads(ended.out.splitlines()[-1])


@pytest.fixture(scope="session")
def draft(tmp_path_factory):
    return random_draft(tmp_path_factory.mktemp("drafts") / "tiny", tiny_model(context=512))


@pytest.fixture
def other(tmp_path):
    return random_draft(tmp_path / "other", tiny_model(kv_heads=3))


@pytest.fixture
def bench(shell, model_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "one two one two one two"}))

    def run(*arguments):
        return shell("bench", "--model", model_folder, "--data", path, "-n", 6, "--repeats", 1, "--json", *arguments)

    return run


@pytest.fixture
def doctor(shell, model_folder, shipped_in, tmp_path):
    """Runs doctor with a draft and without shipped ones: its exit code and the draft's entry."""
    shipped_in(tmp_path / "nothing")

    def run(*draft):
        ended = shell("doctor", "--model", model_folder, "--json", *(("--draft", *draft) if draft else ()))
        return ended, (last(ended)["drafts"] or [None])[-1]

    return run


def test_doctor_examines_drafts(doctor, draft, other, shipped_in, tmp_path):
    ended, found = doctor()
    assert found is None and "none comes with longdraft" in ended.out
    ended, found = doctor(draft)
    assert f"longdraft bench length --draft {draft}" in ended.out
    assert (ended.code, found["method"], found["fits"], found["reason"]) == (0, "longspec", True, None)
    assert (found["shipped"], found["trained_length"], found["vocabulary"]) == (False, 64, None)
    ended, found = doctor(other)
    assert (ended.code, found["fits"]) == (1, False) and "cannot be used" in ended.out
    assert "kv_heads 3 (this target: 2)" in found["reason"]
    ended, found = doctor(tmp_path / "none")
    assert ended.code == 1 and "no draft folder" in found["reason"]
    shipped_in(tmp_path)  # holds `other`, which is made for another model
    ended, found = doctor()
    assert (ended.code, found["shipped"], found["fits"], found["reason"]) == (0, True, False, None)
    assert "for another target" in ended.out


# --- EAGLE-3 ---


@pytest.fixture(scope="session")
def eagle3(tmp_path_factory):
    """For the tiny model of three layers."""
    folder = tmp_path_factory.mktemp("eagle3") / "tiny"
    return random_eagle3(folder, tiny_model(context=512), layers=(0, 1, 2), kept=list(range(5, 50)))


def test_generate_with_an_eagle3_draft_and_any_tree(generate, draft, eagle3):
    plain = last(generate("-p", "hello", "-n", 12, "--method", "ar", "--json"))
    for folder, *tree in (
        (eagle3, "--depth", 3, "--tree-top-k", 3, "--nodes", 6),
        (eagle3, "-o", "window=9", "-o", "depth=2"),
        (eagle3, "--tree", "opt", "--threshold", 0.2, "--nodes", 6),
        (draft, "--method", "longspec", "--widths", "3,4", "--nodes", 5),
    ):
        found = last(generate("-p", "hello", "-n", 12, "--json", "--draft", folder, *tree))
        assert found["method"] == ("eagle3" if folder is eagle3 else "longspec")
        assert found["token_ids"] == plain["token_ids"]


def test_bench_gives_a_draft_to_the_method_that_reads_it(bench, eagle3, draft, shipped_in, cpu_offloads):
    shipped_in(draft.parent)
    ended = bench("--methods", "longspec,eagle3", "--draft", eagle3, "--tree", "dynamic", "--depth", 2,
                  "--offload", "host:1")  # fmt: skip
    assert ended.code == 0
    rows = last(ended)["rows"]
    assert [row["method"] for row in rows] == ["ar", "longspec", "eagle3"]
    assert all(row["mismatches"] == 0 for row in rows)


def test_doctor_remarks_on_an_eagle3_draft(doctor, eagle3, tmp_path):
    ended, found = doctor(eagle3)
    assert (ended.code, found["method"], found["fits"], found["vocabulary"]) == (0, "eagle3", True, 45)
    assert any("head size is 12" in remark for remark in found["remarks"])
    assert "head size is 12" in " ".join(ended.out.split())
    ended, found = doctor(published_eagle3(tmp_path / "published", tiny_model(context=512)))
    assert ended.code == 1 and "layers 1, 0, -1" in found["reason"]


def test_export(shell, generate, eagle3, draft, tmp_path):
    to = ("--to", "speculators", "--verifier", "some/target", "--max-position", 4096)
    for folder, words in ((eagle3, to), (draft, ("--to", "longdraft", "--bits", "4"))):
        out = tmp_path / folder.parent.name
        ended = shell("export", folder, out, *words)
        assert ended.code == 0 and "is written" in ended.err
        runs = [last(generate("-p", "hello", "-n", 12, "--json", "--draft", each)) for each in (folder, out)]
        assert runs[0]["token_ids"] == runs[1]["token_ids"] and runs[0]["method"] == runs[1]["method"]
        if folder is eagle3:
            assert runs[0]["rounds"] == runs[1]["rounds"]
            verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
            config = json.loads((out / "config.json").read_text())
            assert config["speculators_config"]["verifier"] == verifier
        else:
            small, whole = (each / "model.safetensors" for each in (out, folder))
            assert small.stat().st_size < whole.stat().st_size


def test_gguf_files_draft(shell, tmp_path):
    """The target's file and the draft's, wherever a draft folder can be named."""
    pytest.importorskip("gguf")
    target, small = (tmp_path / f"{name}.gguf" for name in ("target", "small"))
    write_gguf(target)
    write_gguf(small, layers=1, seed=1)
    asked = ("generate", "--model", target, "-p", "the hen", "--raw", "-n", 8, "--json")
    plain = last(shell(*asked, "--method", "ar"))
    for method in ((), ("--method", "small-lm"), ("--method", "specextend", "-o", "chunks=6")):
        found = last(shell(*asked, "--draft", small, *method))
        assert found["method"] == (method[1] if method else "small-lm") and found["token_ids"] == plain["token_ids"]
