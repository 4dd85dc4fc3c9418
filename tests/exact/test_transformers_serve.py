"""``transformers serve OUT``, of a folder that drafts (docs/transformers.md): its answers are the model's own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longdraft.cli.main import main
from tests.serve.over_http import http, wait_until
from tests.support.tiny import tiny_model, tiny_tokenizer

PORT = 8977
ASKED = [{"role": "user", "content": "ship, ship, ship"}]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="needs uvicorn")
def test_an_exported_folder_is_served(tmp_path):
    model, tokenizer = tiny_model(context=512), tiny_tokenizer(chat=True)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["export", "prompt-lookup", tmp_path / "OUT", "--to", "custom-generate", "--verifier", tmp_path / "model"]
    assert main([*map(str, words), "--plan", "fixed"]) == 0
    modules, log = tmp_path / "modules", tmp_path / "log"
    program = Path(sys.executable).parent / "transformers"
    with log.open("w") as said:
        run = subprocess.Popen(
            [program, "serve", "OUT", "--trust-remote-code", "--port", str(PORT)],
            cwd=tmp_path, stdout=said, stderr=said, env=os.environ | {"HF_MODULES_CACHE": str(modules)},
        )  # fmt: skip

    def listens() -> bool:
        assert run.poll() is None, log.read_text()
        return "Uvicorn running" in log.read_text()

    try:
        wait_until(listens, 240)
        body = {"model": "OUT", "messages": ASKED, "max_tokens": 24, "temperature": 0, "stream": False}
        status, answer = http(f"http://localhost:{PORT}/v1/chat/completions", body, 120)
    finally:
        run.kill()
        run.wait()
    assert status == 200, (answer, log.read_text())
    ids = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    own = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    said_text = json.loads(answer)["choices"][0]["message"]["content"]
    assert said_text == tokenizer.decode(own, skip_special_tokens=True) and torch.is_tensor(own)
    assert any("longdraft" in file.read_text() for file in modules.rglob("generate.py"))  # ours decoded it
