"""Real clients against ``longdraft serve`` for an hour, some killed in mid-answer, with restarts: is anything lost?

    python -m tests.clients.soak --model FILE --minutes 60 --restarts 2 --kills 1

The clients are those of ``make test-clients``, in its environments (--folder), and what they ask is in
``soak_client.py``. Compares what the clients counted with ``/metrics``, the texts of equal requests with each other,
and shows the server's memory. Exit status: the number of differences.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from tests.clients.run import wait_for

CLIENTS = ("openai", "openai", "litellm", "langchain")
PORT = 8766
# /metrics' names -> ours.
COUNTED = {"request_success": "answered", "request_failure": "refused", "prompt_tokens": "prompt",
           "generation_tokens": "new", "prefix_cache_hits": "kept"}  # fmt: skip
Counts = collections.Counter


class Server:
    """``longdraft serve``, its figures when somebody last looked, and the sum of those of its earlier lives."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.url, self._options = f"http://127.0.0.1:{PORT}", options
        self.before: Counts[str] = Counts()
        self.last: Counts[str] = Counts()
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "longdraft", "serve", "--model", self._options.model, "--port", str(PORT)]
        command += ["--slots", "3", "--context", "6144", "--snapshots", str(self._options.work / "kept")]
        began = time.monotonic()
        with (self._options.work / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self.url, self.process)
        print(f"The server is ready after {time.monotonic() - began:.1f} s.", flush=True)

    def look(self) -> Counts[str]:
        """The figures of /metrics, of this life."""
        with urlopen(f"{self.url}/metrics", timeout=60) as page:
            found = re.findall(r"^longdraft:(\w+)_total\{(.*?)\} (\S+)$", page.read().decode(), re.MULTILINE)
        self.last = Counts()
        for name, labels, value in found:
            if name in COUNTED:
                self.last[COUNTED[name]] += int(float(value))
            if name == "request_failure":
                self.last[re.search(r'status="(\d+)"', labels)[1]] += int(float(value))  # type: ignore[index]
        return self.last

    def drain(self) -> None:
        """SIGTERM while clients ask; /metrics is read until nothing listens any more."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        while self.process.poll() is None:
            with contextlib.suppress(URLError, ConnectionError, TimeoutError):
                self.look()
            time.sleep(0.02)
        print(f"It ended {time.monotonic() - began:.1f} s after SIGTERM, status {self.process.returncode}.", flush=True)
        self._ended()

    def kill(self) -> None:
        self.look()
        self.process.kill()
        self.process.wait()
        self._ended()

    def _ended(self) -> None:
        self.before += self.last
        self.last = Counts()

    @property
    def memory(self) -> int:
        """MiB of resident memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss / 2**20)


def client(package: str, seed: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    python = (options.folder / package / "bin" / "python").absolute()
    told = {"BASE_URL": f"http://127.0.0.1:{PORT}/v1", "MODEL": Path(options.model).name,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # fmt: skip
    script = Path(__file__).with_name("soak_client.py")
    return subprocess.Popen([python, script, package, str(seed), options.work / f"{seed}.jsonl"], env=os.environ | told)


def soak(options: argparse.Namespace) -> tuple[Server, list[int], set[int]]:
    """Runs it; returns the server, its memory every half minute, and the numbers of the killed clients."""
    server = Server(options)
    seeds = iter(range(1000))
    clients = {(seed := next(seeds)): client(package, seed, options) for package in CLIENTS}
    packages = dict(zip(clients, CLIENTS, strict=True))
    killed: set[int] = set()
    memory: list[int] = []
    choose, start, end = random.Random(0), time.monotonic(), 60 * options.minutes
    events = [end * (i + 1) / (options.restarts + 1) for i in range(options.restarts)]
    kills = [end * (i + 0.5) / (options.kills + 0.5) for i in range(options.kills)]
    try:
        while (now := time.monotonic() - start) < end:
            time.sleep(min(30, end - now))
            memory.append(server.memory)
            figures = dict(server.look())
            print(f"{time.monotonic() - start:5.0f} s: {memory[-1]} MiB, this life {figures}", flush=True)
            if events and now > events[0]:
                events.pop(0)
                server.drain()
                server.start()
            elif kills and now > kills[0]:
                kills.pop(0)
                print("kill -9", flush=True)
                server.kill()
                server.start()
            elif len(memory) % 2 == 0:
                old = choose.choice(list(clients))
                clients[old].kill()
                clients.pop(old).wait()
                killed.add(old)
                seed = next(seeds)
                clients[seed] = client(packages[old], seed, options)
                packages[seed] = packages[old]
        (options.work / "hold").touch()  # no new requests; what runs is answered
        while any(unfinished(options.work / f"{seed}.jsonl") for seed in clients):
            time.sleep(0.2)
        server.look()
        memory.append(server.memory)
    finally:
        for each in clients.values():
            each.kill()
            each.wait()
    server.drain()
    return server, memory, killed


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []


def unfinished(log: Path) -> bool:
    found = lines(log)
    return bool(found) and found[-1]["state"] == "begun"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--restarts", type=int, default=2, help="by SIGTERM, while clients ask")
    parser.add_argument("--kills", type=int, default=1, help="by SIGKILL")
    parser.add_argument("--folder", type=Path, default=Path(".venv-clients"), help="the clients' environments")
    parser.add_argument("--work", type=Path, default=Path("soak"), help="a folder for logs and snapshots, made anew")
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    server, memory, killed = soak(options)
    return report(options, server.before, memory, killed)


def report(options: argparse.Namespace, served: Counts[str], memory: list[int], killed: set[int]) -> int:
    """Prints what clients and /metrics counted; returns the number of differences."""
    asked: Counts[str] = Counts()
    texts: dict[tuple[Any, ...], Counts[str]] = collections.defaultdict(Counts)
    failures: Counts[str] = Counts()
    for log in options.work.glob("*.jsonl"):
        found = lines(log)
        asked["begun"] += sum(line["state"] == "begun" for line in found)
        for line in found:
            asked[line["state"]] += line["state"] != "begun"
            if line["state"] == "done":
                asked["prompt"] += line["prompt"]
                asked["new"] += line["new"]
                texts[line["kind"], line["size"], line["question"], line["temperature"]][line["said"]] += 1
            elif line["state"] == "failed":
                failures[f"{line['status']} {line['error'][:100]}"] += 1
        asked["cut"] += unfinished(log)
    print(f"Clients: {dict(asked)}; {len(killed)} were killed.\n/metrics: {dict(served)}")
    for failure, count in failures.most_common():
        print(f"  {count} x {failure}")
    different = {key: found for key, found in texts.items() if len(found) > 1}
    print(f"Texts: {sum(sum(found.values()) > 1 for found in texts.values())} requests were repeated, "
          f"{len(different)} of them with different texts.")  # fmt: skip
    for key, found in different.items():
        print(f"  {key}: {found.most_common()}")
    quarters = [memory[len(memory) * i // 4 : len(memory) * (i + 1) // 4] for i in range(4)]
    print("Memory, medians of the quarters:", *(int(statistics.median(each)) for each in quarters if each), "MiB")
    return len(different)


if __name__ == "__main__":
    sys.exit(main())
