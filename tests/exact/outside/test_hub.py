"""Models and drafts on the hub: cards, and fetching, against a small hub of this process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import ModelCard, constants, metadata_load

from longdraft import Speculator, load
from longdraft.drafters.longspec import LongSpecDraft
from longdraft.drafts import hub, shipped
from longdraft.errors import CheckpointError
from longdraft.model.load.embedded import EMBEDDED_ID
from longdraft.registry import kind_of
from tests.support.drafts import random_draft
from tests.support.tiny import tiny_folder, tiny_model

ID, COMMIT = "made-up/draft", "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory, as the hub's client asks for them."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, dict[str, bytes]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            name = "/".join(path.split("/")[2:4])
            if name not in self.repositories:
                return self.reply({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            files = [{"rfilename": n, "type": "file", "path": n, "size": len(x), "oid": n}
                     for n, x in self.repositories[name].items()]  # fmt: skip
            return self.reply(files if "/tree/" in path else {"id": name, "sha": COMMIT, "siblings": files})
        # transformers asks for the branch where it could not resolve it to a commit first.
        name, _, file = path.replace("/resolve/main/", f"/resolve/{COMMIT}/").partition(f"/resolve/{COMMIT}/")
        if file not in self.repositories.get(name, ()):
            return self.reply({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        return self.reply(self.repositories[name][file], 200, {"ETag": f'"{file}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def reply(self, body: object, code: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": f"{len(content)}"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def client(tmp_path, monkeypatch):
    """huggingface_hub as a user's process has it: no token, an empty cache."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HF_TOKEN_PATH": "token", "HF_HUB_CACHE": "cache"}.items():
        monkeypatch.setattr(constants, name, str(tmp_path / value))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.close_session()
    hub.download.cache_clear()
    yield monkeypatch
    huggingface_hub.close_session()
    hub.download.cache_clear()


@pytest.fixture
def online(client):
    """The repositories of a hub that is there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("", (Hub,), {"repositories": {}}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client.setattr(constants, "HF_HUB_OFFLINE", False)
    client.setattr(constants, "ENDPOINT", address := f"http://127.0.0.1:{server.server_address[1]}")
    client.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    yield server.RequestHandlerClass
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    random_draft(tmp_path / "draft", tiny_model())
    return tmp_path / "draft"


def test_a_saved_draft_has_a_card_that_the_hub_reads(folder, tmp_path):
    LongSpecDraft.load(folder).save(out := tmp_path / "out")
    found = metadata_load(out / "README.md")
    assert found["library_name"] == "longdraft" and found["pipeline_tag"] == "text-generation"
    assert found["license"] and {"longspec", "speculative-decoding"} <= {*found["tags"]}
    assert "longspec" in ModelCard.load(out / "README.md").text
    (out / "README.md").write_text("mine")
    LongSpecDraft.load(folder).save(out, bits=8)
    assert (out / "README.md").read_text() == "mine"


def test_the_drafts_that_ship_have_headers(tmp_path):
    for place in shipped.folders():
        found = metadata_load(place / "README.md")
        assert found["base_model"] == EMBEDDED_ID and found["license"] == "apache-2.0", place
        assert found["library_name"] == "longdraft" and kind_of(place).name in found["tags"]
    kind_of(place).load(place).save(tmp_path / "out")
    assert metadata_load(tmp_path / "out" / "README.md") == found


def test_used_by_its_id(folder, online):
    with pytest.raises(CheckpointError, match=ID):
        kind_of(ID)
    online.repositories[ID] = {path.name: path.read_bytes() for path in folder.iterdir()}
    model, prompt = tiny_model(), [[7, 8, 9, 7, 8, 9]]
    by_id, by_folder, plain = (
        Speculator(*given, target=model, **draft).generate(prompt, max_new_tokens=20)[0]
        for given, draft in (((), {"draft": ID}), (("longspec",), {"draft": folder}), (("ar",), {}))
    )
    assert by_id.token_ids == by_folder.token_ids == plain.token_ids and by_id.drafted > by_id.accepted
    assert LongSpecDraft.load(ID).config == LongSpecDraft.load(folder).config


def test_a_model_by_its_id_out_of_the_hub_and_then_out_of_the_cache(online, client, tmp_path):
    folder = tiny_folder(tmp_path / "model", context=512)
    online.repositories["made-up/model"] = {path.name: path.read_bytes() for path in folder.iterdir()}

    def text(model):
        (result,) = Speculator("prompt-lookup", *load(model, device="cpu")).generate("ship, ship, ship")
        assert result.rounds > 0
        return result.token_ids

    expected = text(folder)
    assert text("made-up/model") == expected
    online.repositories.clear()
    client.setattr(constants, "HF_HUB_OFFLINE", True)
    assert text("made-up/model") == expected
    with pytest.raises(CheckpointError, match="made-up/another"):
        load("made-up/another")
