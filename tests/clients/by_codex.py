"""Codex: a session of two turns in a small repository, the second in another process."""

from __future__ import annotations

from program import MODEL, URL, folder, run, session

(folder / "greeting.py").write_text('def greet(name):\n    return "Hello, " + name\n')
(folder / ".codex").mkdir()
(folder / ".codex" / "config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "longdraft"
model_context_window = 32768
approval_policy = "never"
sandbox_mode = "danger-full-access"  # only the folder of this test matters; sandboxes do not start in every container
web_search = "disabled"
check_for_update_on_startup = false
analytics.enabled = false
features = {{ apps = false, plugins = false }}

[model_providers.longdraft]
name = "longdraft"
base_url = "{URL}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = 3600000
""")
common = ("--skip-git-repo-check", "--json")
session(
    lambda: run("codex", "exec", *common, "Show greeting.py with the shell, then say what it does in one sentence."),
    lambda: run("codex", "exec", "resume", "--last", *common, "Which argument does greet take? Answer in one word."),
)
