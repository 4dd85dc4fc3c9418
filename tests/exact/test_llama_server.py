"""llama.cpp drafts with what ``longdraft export --to gguf`` writes: its own greedy tokens, and our chain's acceptance.

LONGDRAFT_LLAMA_SERVER names a ``llama-server`` that knows ``draft-eagle3``. In float32, where its forwards of several
tokens round as those of one do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from longdraft import Speculator, load
from longdraft.cli.main import main
from longdraft.drafts import draft_folder, shipped
from longdraft.model.chat import chat_prompt
from longdraft.model.embedded import EMBEDDED_ID, packaged_file

SERVER = os.environ.get("LONGDRAFT_LLAMA_SERVER", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(not SERVER, reason="LONGDRAFT_LLAMA_SERVER names no llama-server"),
]
gguf = pytest.importorskip("gguf")
NEW, CHAIN = 48, 3
QUESTIONS = ("Write a short story about a river and a mill.", "Explain how photosynthesis works.")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The embedded model's file with its blocks unpacked."""
    file = tmp_path_factory.mktemp("target") / "float32.gguf"
    reader = gguf.GGUFReader(packaged_file())
    writer = gguf.GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@contextmanager
def serving(target: Path, *options: str):
    """A function from token ids to the server's answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    floats = [flag for name in ("-ctk", "-ctv") for flag in (name, "f32")]
    command = [SERVER, "-m", str(target), "--port", port, "-c", "1024", "-np", "1", "-fa", "off", *floats, *options]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(ids: list[int]) -> dict:
        body = {"prompt": ids, "n_predict": NEW, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        request = Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
        with urlopen(request, timeout=300) as answer:
            return json.load(answer)

    try:
        for _ in range(240):
            assert running.poll() is None, "the server ended"
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except (URLError, OSError):
                time.sleep(0.5)
        yield ask
    finally:
        running.terminate()
        running.wait(30)


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load().tokenizer
    return [chat_prompt(tokenizer, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(target, prompts):
    with serving(target) as ask:
        return [ask(ids)["tokens"] for ids in prompts]


@pytest.mark.parametrize(
    ("method", "folder", "spec_type"), [("eagle3", "eagle3", "draft-eagle3"), ("small-lm", "lm", "draft-simple")]
)
def test_it_drafts_as_our_chain_does(tmp_path, target, prompts, plain, method, folder, spec_type):
    draft, file = shipped.FOLDER / f"smollm2-135m-instruct-{folder}", tmp_path / "draft.gguf"
    assert main(["export", str(draft), str(file), "--to", "gguf", "--verifier", EMBEDDED_ID]) == 0
    drafting = ["-md", str(file), "--spec-type", spec_type, "--spec-draft-n-max", str(CHAIN), "--spec-draft-p-min", "0"]
    with serving(target, *drafting, "-ctkd", "f32", "-ctvd", "f32") as ask:
        found = [ask(ids) for ids in prompts]
    assert [each["tokens"] for each in found] == plain
    accepted = sum(each["timings"]["draft_n_accepted"] for each in found)
    if method == "small-lm":  # there it proposes any token of the target's
        contents = draft_folder.load(draft)
        del contents.tensors["d2t"]
        draft = tmp_path / "whole"
        draft_folder.save(draft, replace(contents, config=contents.config | {"draft_vocab_size": None}))
    model = load(weights="float32").model
    ours = Speculator(method, target=model, draft=draft, tree="chain", depth=CHAIN, plan="fixed")
    expected = sum(result.accepted for result in ours.generate(prompts, max_new_tokens=NEW, batch=1))
    assert expected > 0 and abs(accepted - expected) <= 0.1 * expected + 1
