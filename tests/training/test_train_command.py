"""``longdraft train``, as a shell calls it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from longdraft.cli import options
from longdraft.cli.main import main
from longdraft.drafts import draft_folder
from longdraft.errors import CheckpointError
from longdraft.training.config import preset_path, settings_table
from tests.serve.conftest import Running, make_service
from tests.support import elsewhere
from tests.support.slow_marks import slow
from tests.training.helpers import ROOT, SMALL, TRAININGS, losses_of

FAST = ["max_length=64", "min_length=16", "rows=256", "precision=no", "device=cpu", "threads=1", "held_out=0.2"]


@pytest.fixture
def shell(capsys):
    def run(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = main(["train", *map(str, arguments)])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    yield run
    options.reset_debug()


def test_from_text_to_a_draft_that_generates(shell, target, text, tmp_path):
    answers, out = tmp_path / "answers.jsonl", tmp_path / "run"
    with contextlib.closing(Running(make_service())) as server:
        made = shell(
            "data", text, "--out", answers, "--url", server.url, "--rows", 40, "--batch", 4, "--max-tokens", 30,
            "--passage-tokens", "5,20", "--per-passage", 6, "--json",
        )  # fmt: skip
    assert made.code == 0, made.err
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    told, new = json.loads(made.out), sum(row["usage"][1] for row in rows)
    assert told.items() >= {"out": str(answers), "rows": 40, "left_out": {}, "tokens": new}.items()
    assert len(rows) == 40 and {row["source"] for row in rows} == {str(text)}
    assert set(rows[0]) == {"messages", "cut", "usage", "temperature", "source", "kind", "at"}
    words = ["window=12", "intermediate_size=64", "max_length=200"]
    assert shell("longspec", *FAST, *words, f"data={answers}", f"target={target}", f"out={out}").code == 0
    assert main(["generate", "--model", str(target), "--draft", str(out / "best"), "-p", "hi", "-n", "8"]) == 0


def test_what_a_run_says(shell, target, text, tmp_path):
    out = tmp_path / "run"
    trained = shell("tokenswift", *FAST, "epochs=0.5", f"data={text}", f"target={target}", f"out={out}", "--json")
    assert trained.code == 0, trained.err
    assert f"longdraft generate --model {target} --draft {out / 'best'}" in " ".join(trained.err.split())
    for word in ("documents", "loss", "agreement", "tokens/s", "simulated acceptance"):
        assert word in trained.err
    payload = json.loads(trained.out)
    assert payload["draft"] == str(out / "best") and set(payload) == {"draft", "steps", "loss", "simulated"}
    assert draft_folder.load(out / "best").tensors


def test_tokens_once_and_for_all(shell, target, text, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text.read_text() + '{"text": 1}\n')
    words = ("data", rows, "--target", target, "--kind", "tokens", "--out")
    made = shell(*words, tmp_path / "t", "--json")
    assert (
        made.code == 0
        and "Left out: 1 with text, messages or tokens of another form (keys: text)" in made.err
        and json.loads(made.out)["rows"] == 40
    )
    assert shell(*words, tmp_path / "t.jsonl").code == 2
    words = [f"data={tmp_path / 't'}", f"target={target}", f"out={tmp_path / 'run'}", "max_steps=2"]
    assert shell("longspec", *FAST, *words).code == 0 and len(losses_of(tmp_path / "run")) == 2


def test_presets_are_listed_and_printed(shell):
    listed, one = shell("presets"), shell("presets", "longspec/8b/3-answers")
    assert listed.code == one.code == 0 and "longspec/8b/3-answers" in listed.out
    assert one.out == preset_path("longspec/8b/3-answers").read_text()
    assert shell("presets", "longspec/9-answers").code == 2


def test_rows_are_shown_as_the_model_sees_them(shell, target, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hi", "response": "yes"}\n{"text": "abc"}\n{"x": 1}\n')
    shown = shell("data", rows, "--target", target, "--show", 3, "--json")
    assert shown.code == 0 and json.loads(shown.out.splitlines()[-1]) == {"rows": 2}
    assert "<user>hi<eos><assistant>⟦yes<eos>⟧" in shown.out and "a⟦bc<eos>⟧" in shown.out
    assert "(keys: x)" in shown.err
    assert "--out" in shell("data", rows).err


def test_the_hint_names_what_the_draft_needs(shell, target, text, tmp_path):
    own = tmp_path / "my kind.py"
    own.write_text("")
    words = [*FAST, "window=12", "intermediate_size=64", "max_steps=2", f"data={text}", f"target={target}"]
    made = shell("--load", own, "longspec", *words, f"out={tmp_path / 'a run'}")
    assert made.code == 0, made.err
    hint = f"longdraft generate --model {target} --load '{own}' --draft '{tmp_path / 'a run' / 'best'}'"
    assert hint in " ".join(made.err.split())
    card = (tmp_path / "a run" / "last" / "README.md").read_text()
    assert "`text.jsonl`: " in card and "| steps | 2 " in card and "tokens a round, estimated" in card


def test_a_finished_run_goes_on(shell, target, text, tmp_path):
    words = [*FAST, "window=12", "intermediate_size=64", f"data={text}", f"target={target}", f"out={tmp_path / 'run'}"]
    assert shell("longspec", *words, "epochs=1").code == 0
    first = losses_of(tmp_path / "run")
    assert shell("longspec", *words, "epochs=2").code == 0
    both = losses_of(tmp_path / "run")
    assert len(both) == 2 * len(first) and both[: len(first)] == first
    assert shell("longspec", *words, "epochs=1").code == 1  # it cannot be made shorter


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["longspec", "--config", "none.yaml"], "There is no configuration none.yaml"),
        (["longspec", "data=x.jsonl", "epoch=1"], "No setting epoch. Did you mean epochs?"),
        (["longspec", "data=none.jsonl"], "There is no file or folder none.jsonl"),
        (["longspec"], "No data"),
        (["data", "x.jsonl", "--out", "y.jsonl", "--passage-tokens", "5"], "--passage-tokens takes two numbers"),
        (["data", "x.jsonl", "--out", "y.jsonl", "--temperatures", "warm"], "--temperatures takes numbers"),
        (["data", "x.jsonl", "--out", "y.jsonl", "--temperatures", ","], "--temperatures takes numbers"),
        (["data", "none.jsonl", "--out", "y.jsonl", "--url", "http://127.0.0.1:9"], "There is no file none.jsonl"),
    ],
)
def test_wrong_settings_in_one_line(shell, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").touch()
    ended = shell(*arguments)
    assert ended.code == 2
    assert ended.err.startswith("error: ") and said in ended.err and len(ended.err.splitlines()) == 1


def test_what_train_data_refuses(shell, text, tmp_path):
    ended = shell("data", text, "--out", tmp_path / "a.jsonl")
    assert ended.code == 2 and "--url" in ended.err
    words = ("data", text, "--out", tmp_path / "a.jsonl", "--url", "http://127.0.0.1:9")
    for wrong in (["--part", "1/2"], ["--price", "1,2"], ["--kind", "repeats"], ["--kind", "tokens"], ["--dtype", "a"]):
        assert shell(*words, *wrong).code == 2
    ended = shell("data", text, "--out", "none/y.jsonl")
    assert ended.code == 1 and "--out none/y.jsonl" in ended.err


def test_only_one_of_several_processes_speaks(shell, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    ended = shell("longspec")
    assert (ended.code, ended.err) == (2, "")


@pytest.mark.parametrize("command", sorted(SMALL))
def test_help_has_every_setting_with_its_range_and_meaning(shell, command):
    found = shell(command, "--help").out
    for name, default, values, meaning in settings_table(TRAININGS[command].load_settings()):
        assert meaning and values, name
        (line,) = (line for line in found.splitlines() if line.split()[:1] == [name])
        assert default in line and values in line and meaning in line
    assert " 1.0 " in found and "above 0" in found  # a share of 1 is not true


def test_a_resumed_run_says_where_and_a_checkpoint_says_where_the_draft_is(shell, target, text, tmp_path):
    out = tmp_path / "run"
    words = ["longspec", *FAST, f"data={text}", f"target={target}", f"out={out}", "save_every=1", "keep=9"]
    assert "resuming" not in shell(*words).err
    assert "nothing is left to train" in shell(*words).err
    *_, before, last = sorted((out / "checkpoints").iterdir())
    for path in (out, out / "checkpoints", before):
        with pytest.raises(CheckpointError, match="best"):
            draft_folder.read_config(path)
    with pytest.raises(CheckpointError):
        draft_folder.read_config(out / "best" / "config.json")
    shutil.rmtree(last)
    shutil.rmtree(out / "best")
    shutil.rmtree(out / "last")
    with pytest.raises(CheckpointError):
        draft_folder.read_config(before)
    step = int(before.name.removeprefix("step-"))
    assert f"resuming at step {step:,} of {step + 1:,}" in shell(*words).err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "ddp", "fsdp2"])
def test_launchers(target, text, tmp_path, launcher):
    """The commands of docs/training.md. accelerate shards only on accelerators, so fsdp2.yaml is just read here."""
    if launcher == "torchrun":
        begin = ["torch.distributed.run", "--nproc-per-node", 2]
    else:
        begin = [
            "accelerate.commands.launch",
            "--config_file",
            preset_path(f"accelerate/{launcher}"),
            "--num_processes",
            2,
        ]
    words = ["-m", "longdraft", "train", "longspec", *FAST, "window=12", "intermediate_size=64"]
    given = [sys.executable, "-m", *begin, *words, f"data={text}", f"target={target}", f"out={tmp_path / 'run'}"]
    ended = subprocess.run([*map(str, given)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("The draft is in") == 1
    assert losses_of(tmp_path / "run") and draft_folder.load(tmp_path / "run" / "best").tensors


def _train(words: list[str]) -> None:
    raise SystemExit(main(["train", *words]))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), slow(signal.SIGTERM, 143)])
def test_a_signal_writes_a_checkpoint(target, text, tmp_path, number, code):
    out = tmp_path / "run"
    words = ["longspec", *FAST, "epochs=500", "save_every=0", f"data={text}", f"target={target}", f"out={out}"]
    said = tmp_path / "said"
    process = elsewhere.start(said, _train, words)
    deadline = time.monotonic() + 120
    while not (out / "log.jsonl").exists() and time.monotonic() < deadline and process.is_alive():
        time.sleep(0.1)
    os.kill(process.pid, number)
    assert elsewhere.wait_for_exit(process, 60) == code, said.read_text()
    err = said.read_text()
    assert "The same command continues from there" in err and "Traceback" not in err
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert json.loads((checkpoint / "state.json").read_text())["step"] == len(losses_of(out))
