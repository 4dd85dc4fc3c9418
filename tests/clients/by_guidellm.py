"""guidellm: concurrent streams of synthetic prompts, and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
command = [
    str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress",
    "--backend", f"kind=openai_http,target={os.environ['BASE_URL']},model={os.environ['MODEL']}",
    "--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}",
    "--data", "kind=synthetic_text,prompt_tokens=256,output_tokens=32",
    "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
    "--output", f"kind=json,path={folder / 'report.json'}",
]  # fmt: skip
environment = os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(folder)}
done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
print(done.stdout, done.stderr)
done.check_returncode()
(run,) = json.loads((folder / "report.json").read_text())["benchmarks"]
counts, measured = run["metrics"]["request_totals"], run["metrics"]
assert counts["successful"] == counts["total"] == 6, counts
said, first = measured["output_token_count"]["successful"], measured["time_to_first_token_ms"]["successful"]
assert said["min"] == said["max"] == 32, said
assert 0 < first["median"] < 1000 * measured["request_latency"]["successful"]["median"], first
