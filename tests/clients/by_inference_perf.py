"""inference-perf: two streams of completions, then of chats with shared beginnings, and its reports."""

from __future__ import annotations

import json

from program import MODEL, ROOT, TOKENIZER, folder, run

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
    settings = {
        "api": {"type": kind, "streaming": True},
        "data": data,
        "load": {
            "type": "concurrent", "stages": [{"num_requests": 6, "concurrency_level": 2}], "num_workers": 1,
            "worker_max_concurrency": 2, "request_timeout": 300,
        },
        "server": {
            "type": "vllm", "model_name": MODEL, "base_url": ROOT
        },
        "tokenizer": {"pretrained_model_name_or_path": TOKENIZER},
        "storage": {"local_storage": {"path": str(folder / kind)}},
    }  # fmt: skip
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    run("inference-perf", "-c", str(folder / "config.yml"))
    report = json.loads((folder / kind / "summary_lifecycle_metrics.json").read_text())
    assert report["successes"]["count"] == 6 and report["failures"]["count"] == 0, report["failures"]
    said, latency = report["successes"]["output_tokens"], report["successes"]["latency"]
    assert said["min"] == said["max"] == 32, said
    assert 0 < latency["time_to_first_token"]["median"] < latency["request_latency"]["median"], latency
