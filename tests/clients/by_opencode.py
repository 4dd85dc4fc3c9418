"""opencode: a session of two turns in a small repository, the second in another process."""

from __future__ import annotations

import json

from program import MODEL, URL, folder, run, session

(folder / "greeting.py").write_text('def greet(name):\n    return "Hello, " + name\n')
served = {"limit": {"context": 32768, "output": 512}, "options": {"temperature": 0}}
settings = {
    "model": f"longdraft/{MODEL}",
    "enabled_providers": ["longdraft"],
    "provider": {
        "longdraft": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": URL, "apiKey": "none", "timeout": False},
            "models": {MODEL: served},
        }
    },
    "agent": {"build": {"steps": 4}},
    "autoupdate": False,
    "share": "disabled",
    "lsp": False,
    "formatter": False,
}
(folder / "opencode.json").write_text(json.dumps(settings))
quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
session(
    lambda: run("opencode", "run", "--auto", "Read greeting.py, then say what it does in one sentence.", **quiet),
    lambda: run("opencode", "run", "--auto", "--continue", "Which argument does greet take? Say one word.", **quiet),
)
