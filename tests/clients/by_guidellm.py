"""guidellm: concurrent streams of synthetic prompts, and its report."""

from __future__ import annotations

import json

from program import MODEL, TOKENIZER, URL, folder, run

run(
    "guidellm", "run", "--disable-progress", "--backend", f"kind=openai_http,target={URL},model={MODEL}",
    "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
    "--data", "kind=synthetic_text,prompt_tokens=256,output_tokens=32",
    "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
    "--output", f"kind=json,path={folder / 'report.json'}",
)  # fmt: skip
(measured,) = (each["metrics"] for each in json.loads((folder / "report.json").read_text())["benchmarks"])
counts = measured["request_totals"]
assert counts["successful"] == counts["total"] == 6, counts
said, first = measured["output_token_count"]["successful"], measured["time_to_first_token_ms"]["successful"]
assert said["min"] == said["max"] == 32, said
assert 0 < first["median"] < 1000 * measured["request_latency"]["successful"]["median"], first
