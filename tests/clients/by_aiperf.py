"""aiperf: concurrent streams of synthetic prompts, and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
command = [
    str(Path(sys.executable).with_name("aiperf")), "profile", "--model", os.environ["MODEL"],
    "--url", os.environ["BASE_URL"].removesuffix("/v1"), "--endpoint-type", "chat", "--streaming",
    "--tokenizer", os.environ["TOKENIZER"], "--use-server-token-count", "--per-chunk-usage",
    "--concurrency", "2", "--request-count", "6", "--synthetic-input-tokens-mean", "256", "--output-tokens-mean", "32",
    "--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:32",
    "--output-artifact-dir", str(folder), "--ui", "none",
]  # fmt: skip
environment = os.environ | {"HOME": str(folder)}
done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
print(done.stdout, done.stderr)
done.check_returncode()
(file,) = folder.rglob("profile_export_aiperf.json")
report = json.loads(file.read_text())
assert report["request_count"]["avg"] == 6 and report["request_error_rate"]["avg"] == 0
said = report["output_sequence_length"]
assert said["min"] == said["max"] == 32, said
assert 0 < report["time_to_first_token"]["p50"] < report["request_latency"]["p50"]
