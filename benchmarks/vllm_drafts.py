"""Our proposers inside vLLM, beside vLLM without drafts and its own n-gram lookup: tokens a second, accepted length.

    python benchmarks/vllm_drafts.py TARGET --data FILE.jsonl... [--longspec DRAFT] [--small MODEL] [--eagle3 EXPORTED]
                                     [--context 2000] [--limit 4] [--max-tokens 64] [--rounds 2] [--drafted 3]

Runs in an environment with vLLM (`make test-engines` makes one: .venv-engines/bin/python). Each contender has a process
of its own, and they take turns, one round after the other. A request at a time, greedy, float32. Tokens a second are
those after the first one; a table's cell is a ratio to vLLM without drafts, of the same prompt, by medians of the
rounds: geometric mean over the prompts (lowest), then the accepted length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OURS = "longdraft.plugins.vllm"


def contenders(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """vLLM's settings by name."""
    tokens = args.drafted

    def own(name: str, **options: Any) -> dict[str, Any]:
        config = {"method": "custom_class", "model": f"{OURS}.{name}", "num_speculative_tokens": tokens}
        return {"speculative_config": config, "additional_config": {"longdraft": options}}

    ngram = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    found = {"plain": {}, "vLLM's ngram": {"speculative_config": ngram}, "Lookup": own("Lookup")}
    if args.longspec:
        found["LongSpec"] = own("LongSpec", draft=str(args.longspec))
    if args.small:
        found["SpecExtend"] = own("SpecExtend", draft=str(args.small))
    if args.eagle3:
        config = {"method": "eagle3", "model": str(args.eagle3), "num_speculative_tokens": tokens}
        found["EAGLE-3"] = {"speculative_config": config}
    return found


def decode(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: of each prompt, its tokens and the seconds after the first of them."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    from longdraft.bench import data

    llm = LLM(
        args.target, dtype="float32", max_model_len=args.context + args.max_tokens + 64, max_num_seqs=1,
        disable_log_stats=False, enable_prefix_caching=False, **settings,
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    samples = [sample for file in args.data for sample in data.read([file], args.limit)]
    prompts = [{"prompt_token_ids": data.fitted(sample, tokenizer, args.context)} for sample in samples]
    llm.generate(prompts[:1], sampling, use_tqdm=False)  # some kernels are compiled when they are first called
    before, rows = counted(llm), []
    for prompt in prompts:
        (found,) = llm.generate([prompt], sampling, use_tqdm=False)
        times = found.metrics
        rows.append([list(found.outputs[0].token_ids), times.last_token_ts - times.first_token_ts])
    accepted, rounds = (now - then for now, then in zip(counted(llm), before, strict=True))
    return {"rows": rows, "accepted": 1 + accepted / rounds if rounds else 1.0}


def counted(llm: Any) -> tuple[float, float]:
    """Accepted tokens, and rounds with drafts."""
    counts = {m.name.removeprefix("vllm:spec_decode_num_"): m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return counts.get("accepted_tokens", 0), counts.get("drafts", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--longspec", type=Path)
    parser.add_argument("--small", type=Path)
    parser.add_argument("--eagle3", type=Path)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--drafted", type=int, default=3, help="tokens of a chain")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, out = args.one
        Path(out).write_text(json.dumps(decode(args, contenders(args)[name])))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders(args)}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.rounds):
            for name in found if i % 2 == 0 else reversed(found):
                began, out = time.monotonic(), Path(folder) / "out.json"
                command = [sys.executable, __file__, *sys.argv[1:], "--one", name, str(out)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
                found[name].append(json.loads(out.read_text()))
                print(f"round {i + 1}, {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    table(found)


def table(found: dict[str, list[dict[str, Any]]]) -> None:
    """Markdown."""
    plain = [row[0] for row in found["plain"][0]["rows"]]
    seconds = {
        name: [statistics.median(r["rows"][i][1] for r in rounds) for i in range(len(plain))]
        for name, rounds in found.items()
    }
    print("| | tokens/s | over vLLM without drafts (lowest) | accepted length | same tokens |\n|---|---|---|---|---|")
    for name, rounds in found.items():
        own = seconds[name]
        rate = statistics.median((len(tokens) - 1) / s for tokens, s in zip(plain, own, strict=True))
        ratios = [base / s for base, s in zip(seconds["plain"], own, strict=True)]
        same = sum(row[0] == tokens for row, tokens in zip(rounds[0]["rows"], plain, strict=True))
        print(
            f"| {name} | {rate:.1f} | {statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f}) | "
            f"{rounds[0]['accepted']:.2f} | {same} of {len(plain)} |"
        )


if __name__ == "__main__":
    main()
