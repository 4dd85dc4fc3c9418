"""Qwen Code: a session of two turns in a small repository, the second in another process."""

from __future__ import annotations

import json

from program import MODEL, URL, folder, run, session

(folder / "greeting.py").write_text('def greet(name):\n    return "Hello, " + name\n')
(folder / ".qwen").mkdir()
settings = {
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "tools": {"useRipgrep": False},
    "security": {"auth": {"selectedType": "openai"}},
    "model": {
        "name": MODEL,
        "generationConfig": {
            "timeout": 3600000, "maxRetries": 0, "contextWindowSize": 32768,
            "samplingParams": {"max_tokens": 512, "temperature": 0},
        },
    },
}  # fmt: skip
(folder / ".qwen" / "settings.json").write_text(json.dumps(settings))
common = ("--yolo", "--max-session-turns", "6")
own = {"OPENAI_BASE_URL": URL, "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}
own["HTTPS_PROXY"] = ""  # it would send requests of HTTP there too
session(
    lambda: run("qwen", *common, "-p", "Read greeting.py, then say what it does in one sentence.", **own),
    lambda: run("qwen", *common, "--continue", "-p", "Which argument does greet take? Say one word.", **own),
)
