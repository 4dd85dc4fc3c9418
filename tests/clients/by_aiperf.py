"""aiperf: concurrent streams of synthetic prompts, and its report."""

from __future__ import annotations

import json

from program import MODEL, ROOT, TOKENIZER, folder, run

run(
    "aiperf", "profile", "--model", MODEL, "--url", ROOT, "--endpoint-type", "chat", "--streaming",
    "--tokenizer", TOKENIZER, "--use-server-token-count", "--per-chunk-usage",
    "--concurrency", "2", "--request-count", "6", "--synthetic-input-tokens-mean", "256", "--output-tokens-mean", "32",
    "--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:32",
    "--output-artifact-dir", str(folder), "--ui", "none", HF_HUB_OFFLINE="",  # or it takes the folder for a hub id
)  # fmt: skip
(file,) = folder.rglob("profile_export_aiperf.json")
report = json.loads(file.read_text())
assert report["request_count"]["avg"] == 6 and report["request_error_rate"]["avg"] == 0
said = report["output_sequence_length"]
assert said["min"] == said["max"] == 32, said
assert 0 < report["time_to_first_token"]["p50"] < report["request_latency"]["p50"]
