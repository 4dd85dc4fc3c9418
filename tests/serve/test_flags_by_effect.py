"""The effect of flags of ``longdraft serve``: a server with them and one without. And its counters."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.over_http import http, wait_until
from tests.support import elsewhere
from tests.support.tiny import tiny_model, tiny_tokenizer

CHAT = "/v1/chat/completions"
LIMIT = 2**30 // 100  # --snapshot-gib 0.01
FLAGS = ["--queue", "1", "--timeout", "1.5", "--prefix-gib", "0", "--snapshot-gib", "0.01", "--earlier", "4000"]
if sys.platform == "linux":  # elsewhere 127.0.0.1 is the only loopback address
    FLAGS += ["--host", "127.0.0.2"]


class Started:
    """A server in its own process, with one slot."""

    def __init__(self, folder: Path, model: Path, flags: list[str]) -> None:
        folder.mkdir()
        self.said, self.kept = folder / "said", folder / "kept"
        words = ["--model", str(model), "--port", "0", "--plan", "fixed", "--slots", "1", "--method", "prompt-lookup"]
        kept = ["--snapshots", str(self.kept)] if flags else []
        self.run = elsewhere.start(self.said, elsewhere.command, "serve", *words, *kept, *flags)
        wait_until(self.address, 200)

    def address(self) -> Any:
        assert self.run.is_alive(), self.said.read_text()
        found = self.said.exists() and re.search(r"(http://([\d.]+):(\d+))/v1", self.said.read_text())
        if found:
            self.url, self.host, self.port = found[1], found[2], int(found[3])
        return found

    def ask(self, text: str, new: int = 24, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": new, "temperature": 0, **more}
        status, answer = http(self.url + CHAT, body | {"ignore_eos": True})
        return status, json.loads(answer)

    def files(self) -> list[Path]:
        return sorted(self.kept.rglob("*.safetensors"))


def text(seed: int, length: int = 700) -> str:
    return "".join("abcdefghij"[(i * i * seed + i // (3 + seed)) % 10] for i in range(length))


@pytest.mark.slow
def test_a_server_with_flags_and_one_without(tmp_path):
    # A token's KV takes 9 KB, and a long text takes seconds.
    tiny_model(context=8192, kv_heads=6, head_dim=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    servers: list[Started] = []
    try:
        for name, given in (("flags", FLAGS), ("none", [])):
            servers.append(Started(tmp_path / name, tmp_path / "model", given))
        flags, none = servers
        # It listens where --host says, and nowhere else.
        assert none.host == "127.0.0.1" and flags.ask("a?", 2)[0] == none.ask("a?", 2)[0] == 200
        if sys.platform == "linux":
            assert flags.host == "127.0.0.2"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", flags.port), timeout=5)
        # --earlier: texts of earlier requests are looked up.
        accepted = []
        for server in servers:
            answers = [server.ask("whales and ships.", 60)[1] for _ in range(2)]
            assert answers[0]["choices"] == answers[1]["choices"]
            accepted += [a["usage"]["speculation"]["num_accepted_tokens"] for a in answers]
        first, again, plain, once_more = accepted
        assert again > 40 > first and plain == once_more == first
        # Three texts of 6 MB each: the first one is evicted from 10 MB of files, but not from memory.
        for server in servers:
            for seed in (1, 2, 3):
                before = set(flags.files())
                assert server.ask(text(seed), 2)[0] == 200
                # When it is idle, it writes what it has read.
                wait_until(lambda known=before, s=server: s is none or set(flags.files()) - known)
        assert 0 < sum(f.stat().st_size for f in flags.files()) <= LIMIT and not none.files()
        kept = [server.ask(text(1), 2)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for server in servers]
        assert kept[0] < 10 and kept[1] > 690
        # --timeout
        status, answer = flags.ask("a long one?", 7000)
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 7000
        # --queue: one is decoded, and one waits.
        with ThreadPoolExecutor(5) as pool:
            statuses = list(pool.map(partial(flags.ask, new=7000), ["a?", "b?", "c?", "d?", "e?"]))
        assert [answer["error"]["code"] for status, answer in statuses if status == 429] == ["queue_full"] * 3
    finally:
        for server in servers:
            server.run.kill()


def test_counters_are_the_sums_of_what_the_answers_say(serving):
    running = serving()
    usages = []
    for i, question in enumerate(["the sea, the sea, the sea", "a ship?", "abcabcabcabcabc"]):
        # Asks again with half of the answer in the question, so that drafts are accepted.
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 30 + i, "temperature": 0}
        answer = json.loads(running.http(CHAT, body | {"ignore_eos": True})[1])
        usages.append(answer["usage"])
        body["messages"][0]["content"] += answer["choices"][0]["message"]["content"][:16] + "abc"
        stream = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        lines = running.http(CHAT, body | stream)[1].decode().split("\n")
        usages.append(json.loads(next(line for line in reversed(lines) if "usage" in line)[6:])["usage"])
    counted: Counter[Any] = Counter()
    for family in text_string_to_metric_families(running.http("/metrics")[1].decode()):
        for sample in family.samples:
            counted[sample.name, sample.labels.get("position")] += sample.value
    speculation = [u["speculation"] for u in usages]
    sums = {
        "prompt_tokens": sum(u["prompt_tokens"] for u in usages),
        "generation_tokens": sum(u["completion_tokens"] for u in usages),
        "prefix_cache_queries": sum(u["prompt_tokens"] for u in usages),
        "prefix_cache_hits": sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages),
        **{f"spec_decode_{name}": sum(s[name] for s in speculation)
           for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")},
    }  # fmt: skip
    assert {name: counted[f"longdraft:{name}_total", None] for name in sums} == sums and all(sums.values())
    by_place: Counter[str] = Counter()
    for each in speculation:
        by_place.update({str(place): count for place, count in enumerate(each["accepted_tokens_per_pos"])})
    name = "longdraft:spec_decode_num_accepted_tokens_per_pos_total"
    assert {place: count for (own, place), count in counted.items() if own == name} == by_place
    assert sum(by_place.values()) == sums["spec_decode_num_accepted_tokens"] < sums["spec_decode_num_draft_tokens"]
