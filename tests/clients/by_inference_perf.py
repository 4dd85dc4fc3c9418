"""inference-perf: two streams of completions, then of chats with shared beginnings, and its reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

lengths = {
    name: {"type": "fixed", "min": size, "max": size, "mean": size, "std_dev": 0, "total_count": 6}
    for name, size in (("input_distribution", 256), ("output_distribution", 32))
}
shared = {
    "num_groups": 2, "num_prompts_per_group": 3, "system_prompt_len": 192, "question_len": 64, "output_len": 32
}  # fmt: skip
for kind, data in (
    ("completion", {"type": "synthetic", **lengths}),
    ("chat", {"type": "shared_prefix", "shared_prefix": shared}),
):
    folder = Path(tempfile.mkdtemp())
    settings = {
        "api": {"type": kind, "streaming": True},
        "data": data,
        "load": {
            "type": "concurrent", "stages": [{"num_requests": 6, "concurrency_level": 2}], "num_workers": 1,
            "worker_max_concurrency": 2, "request_timeout": 300,
        },
        "server": {
            "type": "vllm", "model_name": os.environ["MODEL"], "base_url": os.environ["BASE_URL"].removesuffix("/v1")
        },
        "tokenizer": {"pretrained_model_name_or_path": os.environ["TOKENIZER"]},
        "storage": {"local_storage": {"path": str(folder / "reports")}},
    }  # fmt: skip
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = [str(Path(sys.executable).with_name("inference-perf")), "-c", str(folder / "config.yml")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    print(done.stdout, done.stderr)
    done.check_returncode()
    report = json.loads((folder / "reports" / "summary_lifecycle_metrics.json").read_text())
    assert report["successes"]["count"] == 6 and report["failures"]["count"] == 0, report["failures"]
    said, latency = report["successes"]["output_tokens"], report["successes"]["latency"]
    assert said["min"] == said["max"] == 32, said
    assert 0 < latency["time_to_first_token"]["median"] < latency["request_latency"]["median"], latency
