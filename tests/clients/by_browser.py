"""The page in headless Chromium: it sends, streams, stops and is loaded again, at two widths."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.serve.browser import Browser

url = os.environ["BASE_URL"].removesuffix("v1")
LAST, DONE = "turns.at(-1).answers.at(-1)", "turns.length && !running"


def ask(page: Browser, question: str) -> None:
    page.value("document.querySelector('#question').focus()")
    page.write(question)
    page.press("Enter")


with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as page:
    page.screen(1280, 850)
    page.open(url)
    page.until("document.querySelector('#method').value")
    ask(page, "Tell a long story about a lighthouse, a ship and the sea, in ten paragraphs.")
    page.until("document.querySelector('progress, .text')", 2)  # from the first second on
    page.until(f"{LAST}.text.length > 20", 120)
    first = page.value(f"{LAST}.text.length")
    page.until(f"{LAST}.text.length > {first}", 120)  # it streams
    page.press("Escape")
    page.until(DONE)
    assert page.value(f"{LAST}.state") == "stopped", page.value(f"{LAST}.state")
    said = page.value(f"{LAST}.text")
    page.open(url)
    page.until("document.querySelector('.text')")
    assert page.value(f"{LAST}.text") == said
    page.value("document.querySelector('#max_tokens').value = 24")
    page.screen(390, 800)
    ask(page, "Name three colours.")
    page.until(DONE, 120)
    assert page.value(f"{LAST}.state + turns.length") == "done2", page.value(f"{LAST}.error")
    assert page.value("document.documentElement.scrollWidth") <= 390
    assert not page.problems, page.problems
    assert all(address.startswith((url, "data:")) for address in page.requests), page.requests
