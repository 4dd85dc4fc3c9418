"""Measures offload: tokens/s and resident KV memory, with the KV in memory and in a file.

    python benchmarks/offload.py FILE [--context 2048 7000] [--method ar] [--offload disk] [--max-tokens 64]

One prompt of FILE (JSONL as `longdraft bench --data` takes it), cut to each context length, decoded from nothing with
either store, in turn --repeats times; the medians are shown. "resident KV" is the peak of samples taken every 20 ms:
the size of the store, or the growth of the mapped file pages in memory (Linux). "same" says whether
the tokens are. On a GPU give --offload host: "resident KV" is then the store's share of the device's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
from pathlib import Path
from typing import Any

import longdraft
from longdraft.bench.data import fitted, read
from longdraft.memory.disk_store import DiskStore
from longdraft.memory.host_store import HostStore
from longdraft.memory.sizes import human
from longdraft.memory.store import KVStore


def file_pages() -> int:
    """Bytes of files that this process has mapped and in memory: two small numbers that the kernel keeps (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile", "RssShmem")))


def resident(store: KVStore, before: int) -> int:
    """Bytes of keys and values that take memory of the device; ``before``: file pages without the store."""
    if isinstance(store, HostStore):
        return sum(tensor.nbytes for stage in store._stages for tensor in stage.tensors)
    return file_pages() - before if isinstance(store, DiskStore) else store.keys.nbytes + store.values.nbytes


def run(spec: longdraft.Speculator, prompt: list[int], limit: int) -> dict[str, Any]:
    """One decoding from nothing, the memory watched while it runs."""
    cache = longdraft.PromptCache()
    before, most, over = file_pages(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if cache.store is not None:
                most[0] = max(most[0], resident(cache.store, before))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = spec.generate([prompt], max_new_tokens=limit, eos_token_ids=[], cache=cache)[0]
    finally:
        over.set()
        watcher.join()
    assert cache.store is not None
    return {
        "tokens": result.token_ids,
        "prefill": result.prefill_seconds,
        "tokens_per_second": result.tokens_per_second,
        "resident": most[0],
        "whole": KVStore.bytes_for(cache.store.shape, cache.store.slots, cache.store.capacity),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", help="a folder, a GGUF file or a name; the embedded model if left out")
    parser.add_argument("--context", type=int, nargs="*", default=[2048, 7000])
    parser.add_argument("--method", default="ar")
    parser.add_argument("--offload", default="disk", help="disk, a folder, or host on a GPU")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model, tokenizer = longdraft.load(options.model)
    sample = read([options.file], 1)[0]
    specs = {
        place: longdraft.Speculator(options.method, target=model, tokenizer=tokenizer, offload=offload, plan="fixed")
        for place, offload in (("memory", None), (options.offload, options.offload))
    }
    for spec in specs.values():
        run(spec, fitted(sample, tokenizer, 256), 4)  # pays for what a process does only once
    results = []
    print(f"{'context':>8} {'KV in':12} {'KV':>10} {'resident KV':>12} {'prefill s':>10} {'tokens/s':>9}  same")
    for context in options.context:
        prompt = fitted(sample, tokenizer, context)
        runs: dict[str, list[dict[str, Any]]] = {place: [] for place in specs}
        for _ in range(options.repeats):
            for place, spec in specs.items():
                runs[place].append(run(spec, prompt, options.max_tokens))
        expected = runs["memory"][0]["tokens"]
        for place, found in runs.items():
            row = {
                "context": len(prompt),
                "kv_in": place,
                "kv_bytes": found[0]["whole"],
                "resident_kv_bytes": max(r["resident"] for r in found),
                "prefill_seconds": statistics.median(r["prefill"] for r in found),
                "tokens_per_second": statistics.median(r["tokens_per_second"] for r in found),
                "same": all(r["tokens"] == expected for r in found),
            }
            results.append(row)
            print(
                f"{row['context']:8} {place:12} {human(row['kv_bytes']):>10} {human(row['resident_kv_bytes']):>12} "
                f"{row['prefill_seconds']:10.2f} {row['tokens_per_second']:9.2f}  {row['same']}",
                flush=True,
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
