"""Load on servers that speak OpenAI's API: tokens/s of all clients, time to first token, time per token.

    A=longdraft=http://127.0.0.1:8000/v1
    python benchmarks/serving.py --data qmsum.jsonl --context 2000 --clients 1,2,4,8 $A peer=http://127.0.0.1:8001/v1
    python benchmarks/serving.py --data qmsum.jsonl --context 7000 --questions 10 --others 4 $A
    python benchmarks/serving.py --data qmsum.jsonl --context 2000 --overhead $A
    python benchmarks/serving.py --data qmsum.jsonl --context 7000 --fair $A

Servers are loaded in turn, never side by side. Every client sends its next request when its last one has ended. Time
to first token: from sending to the first piece of text. Time per token: from the first piece to the last, over the
tokens between. Prompts are cut to ``--context`` tokens and sent as text; no prompt is sent twice to a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import longdraft
from longdraft.bench.data import read


@dataclass
class Answer:
    """The answer to one request: seconds to its first piece, seconds from there to its end, number of tokens, text."""

    first: float
    rest: float
    tokens: int
    text: str


async def ask(client: httpx.AsyncClient, url: str, model: str, text: str, tokens: int) -> Answer:
    body = {
        "model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start, first, count, said = time.perf_counter(), 0.0, 0, ""
    async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.status_code} {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"{url}: {chunk['error']}")
            piece = chunk["choices"][0]["delta"].get("content") if chunk.get("choices") else None
            if piece:
                first = first or time.perf_counter() - start
                said += piece
            if chunk.get("usage"):
                count = chunk["usage"]["completion_tokens"]
    whole = time.perf_counter() - start
    return Answer(first or whole, whole - (first or whole), count, said)


async def gaps(url: str, model: str, beside: str | None) -> list[float]:
    """Seconds between the pieces of a stream of 300 tokens; with ``beside``, from when that prompt has been sent."""
    body = {"model": model, "messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 300,
            "temperature": 0, "stream": True}  # fmt: skip
    found: list[float] = []
    other: asyncio.Task[Answer] | None = None
    async with httpx.AsyncClient(timeout=600) as client:
        async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            last = 0.0
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last and (beside is None or other is not None):
                        found.append(now - last)
                    last = now
                    if beside is not None and other is None:
                        other = asyncio.create_task(ask(client, url, model, beside, 4))
        if other is not None:
            await other
    return found


async def load(url: str, model: str, texts: list[str], clients: int, tokens: int) -> tuple[list[Answer], float]:
    waiting = list(texts)
    found: list[Answer] = []
    # A server may close a kept connection just when it is used again.
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_keepalive_connections=0)) as client:

        async def one() -> None:
            while waiting:
                found.append(await ask(client, url, model, waiting.pop(0), tokens))

        start = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        return found, time.perf_counter() - start


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def texts_of(options: argparse.Namespace, tokenizer: Any, count: int) -> list[str]:
    """Different texts of ``--context`` tokens: other places of the same documents."""
    documents = [tokenizer(row.document, verbose=False)["input_ids"] for row in read(options.data)]
    size, found, shift = options.context, [], 0
    while len(found) < count:
        before = len(found)
        for ids in documents:
            if len(ids) >= shift + size:
                found.append(tokenizer.decode(ids[shift : shift + size]) + "\n\nSummarise this.")
        shift += size // 2
        if len(found) == before:
            raise SystemExit(
                f"There are {len(found)} texts of {size} tokens, not {count}: give more data, or a smaller --context"
            )
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL[@MODEL]")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--model", help="whose tokens are counted, and what --overhead runs")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--requests", type=int, default=8, help="of each server and number of clients")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--questions", type=int, default=0, help="ask so many questions about one document, one after the other"
    )
    parser.add_argument(
        "--others", type=int, default=0, help="other texts that are asked at once between two questions"
    )
    parser.add_argument("--fair", action="store_true", help="a stream's longest pause while another prompt is read")
    parser.add_argument(
        "--overhead", action="store_true", help="the same requests by Speculator.generate in this process too"
    )
    options = parser.parse_args()
    servers, models = {}, {}
    for each in options.servers:
        name, _, where = each.partition("=")
        servers[name], _, models[name] = where.partition("@")
        if not models[name]:
            models[name] = httpx.get(f"{servers[name]}/models", timeout=60).json()["data"][0]["id"]
    target, tokenizer = longdraft.load(options.model)
    rows = []
    if options.fair:
        (text,) = texts_of(options, tokenizer, 1)
        for name, url in servers.items():
            asyncio.run(load(url, models[name], ["What is a whale?"], 1, 8))  # warm
            for said, beside in (("alone", None), (f"while {options.context} tokens are read", text)):
                found = asyncio.run(gaps(url, models[name], beside))
                print(f"{name}, {said}: longest pause {max(found):.2f} s, median {statistics.median(found):.3f} s")
        return
    if options.questions:
        (document,) = texts_of(options, tokenizer, 1)
        for name, url in servers.items():
            texts = [f"{document}\n\nQuestion {i}: what is said about point {i}?" for i in range(options.questions)]
            found = []
            for i, text in enumerate(texts):
                found += asyncio.run(load(url, models[name], [text], 1, 16))[0]
                between = [f"Reader {i}.{k} says: {document[-4000:]}" for k in range(options.others)]
                if between:
                    asyncio.run(load(url, models[name], between, options.others, 16))
            short = asyncio.run(load(url, models[name], ["What is a whale?", "What is a ship?"], 1, 16))[0][-1]
            seconds = [round(a.first, 3) for a in found]
            rows.append({"server": name, "first_token_seconds": seconds, "without_document": round(short.first, 3)})
            print(json.dumps(rows[-1]))
        return
    numbers = [int(n) for n in options.clients.split(",")]
    texts = texts_of(options, tokenizer, options.requests * len(numbers) + 1)
    if options.overhead:
        asked = {
            name: [asyncio.run(load(url, models[name], [text], 1, options.tokens)) for text in texts]
            for name, url in servers.items()
        }
        # Afterwards: threads of a process that has just computed keep the cores busy for a while.
        spec = longdraft.Speculator(target=target, tokenizer=tokenizer)
        spec.planner()
        own = []
        for text in texts:
            start = time.perf_counter()
            own.append((spec.generate(text, max_new_tokens=options.tokens)[0].text, time.perf_counter() - start))
        for name, found in asked.items():
            pairs = list(zip(found, own, strict=True))[1:]  # the first warms both up
            same = sum(answers[0].text == text for (answers, _), (text, _) in pairs)
            ratios = [seconds / alone for (_, seconds), (_, alone) in pairs]
            print(
                f"{name}: {statistics.median(ratios):.3f} of generate's seconds ({min(ratios):.3f} to "
                f"{max(ratios):.3f}), {same} of {len(pairs)} texts the same"
            )
        return
    print(
        "| server | clients | tokens/s | first token, median / 95th (s) | per token, median / 95th (ms) |\n"
        "|---|---|---|---|---|"
    )
    for step, clients in enumerate(numbers):
        for name, url in servers.items():
            if step == 0:
                asyncio.run(load(url, models[name], texts[-1:], 1, 8))  # warm
            part = texts[step * options.requests : (step + 1) * options.requests]
            found, seconds = asyncio.run(load(url, models[name], part, clients, options.tokens))
            first = [a.first for a in found]
            each = [1000 * a.rest / max(1, a.tokens - 1) for a in found]
            print(
                f"| {name} | {clients} | {sum(a.tokens for a in found) / seconds:.1f} | "
                f"{statistics.median(first):.2f} / "
                f"{percentile(first, 0.95):.2f} | {statistics.median(each):.1f} / {percentile(each, 0.95):.1f} |"
            )


if __name__ == "__main__":
    main()
