"""lm-eval: a task of choices (log-probabilities of echoed prompts) and one of generated text, both made here."""

from __future__ import annotations

import json

from program import MODEL, TOKENIZER, URL, folder, run

rows = [
    ("The capital of France is", ["Paris", "Rome", "Oslo"], 0),
    ("Two plus two is", ["five", "four", "nine"], 1),
    ("The opposite of hot is", ["blue", "tall", "cold"], 2),
]
(folder / "rows.jsonl").write_text(
    "".join(json.dumps({"question": q, "choices": c, "answer": a, "text": c[a]}) + "\n" for q, c, a in rows)
)
common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
(folder / "choices.yaml").write_text(
    f"task: own_choices\noutput_type: multiple_choice\n{common}doc_to_choice: choices\ndoc_to_target: answer\n"
    "metric_list: [{metric: acc}]\n"
)
(folder / "text.yaml").write_text(
    f"task: own_text\noutput_type: generate_until\n{common}doc_to_target: text\n"
    'generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}\n'
    "metric_list: [{metric: exact_match, ignore_case: true}]\n"
)
run(
    "lm_eval", "--model", "local-completions", "--include_path", str(folder),
    "--model_args", f"model={MODEL},base_url={URL}/completions,num_concurrent=1,tokenizer={TOKENIZER}",
    "--tasks", "own_choices,own_text", "--output_path", str(folder / "out"),
    HF_DATASETS_CACHE=str(folder / "cache"),
)  # fmt: skip
(file,) = (folder / "out").rglob("results*.json")
results = json.loads(file.read_text())["results"]
assert results["own_choices"]["acc,none"] == 1, results
