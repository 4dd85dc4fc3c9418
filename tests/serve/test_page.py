"""The page at ``/``, in headless Chromium: what a user sees, with the mouse and without."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from longdraft.serve.page import render_page as page_text
from tests.serve.browser import CHROMIUM, Browser
from tests.serve.over_http import wait_until
from tests.serve.page_server import PLAIN, PageServer

in_a_browser = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
FOLDER = Path(__file__).parents[2] / "src/longdraft/serve"
TEXT = "[...document.querySelectorAll('.text')].map((t) => t.textContent.trim()).join('\\n')"
LAST = "turns.at(-1).answers.at(-1)"
ANSWERED = "turns.length && !running"


def test_the_page_is_one_answer_that_needs_no_other_host_and_writes_no_markup():
    own = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    assert not re.search(r"https?://", own)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", own)
    assert "default-src 'none'" in own and "connect-src 'self'" in own
    scripts = re.findall(r' src="(.*?)"', own)
    assert " src=" not in re.sub(r"<script>.*?</script>", "", page_text(), flags=re.S)
    for script in scripts:
        assert (FOLDER / script).read_text(encoding="utf-8") in page_text()
    others = [Path(script) for script in scripts if script.startswith("vendored/")]
    assert len(others) == len(scripts) - 1 == 2
    for script in others:  # with its licence
        licence = (FOLDER / script).with_name(f"LICENSE.{script.name.split('.')[0]}").read_text(encoding="utf-8")
        assert "Copyright" in licence or "Apache License" in licence


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[PageServer]:
    with contextlib.closing(PageServer()) as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Browser:
    """The loaded page. Each test has its own port, so its own origin and session storage."""
    browser.screen(1280, 850)
    browser.requests.clear()
    browser.open(server.url)
    browser.until("document.querySelector('#method').value === 'self'")
    browser.problems.clear()
    return browser


def ask(page: Browser, question: str) -> None:
    page.value("document.querySelector('#question').focus()")
    page.write(question)
    page.press("Enter")


def answer(page: Browser, question: str) -> None:
    ask(page, question)
    page.until(ANSWERED)


def press_button(page: Browser, name: str, until: str = "true") -> None:
    page.value(f"[...document.querySelectorAll('button')].find((b) => b.textContent === {json.dumps(name)}).click()")
    page.until(until)


def text_of(page: Browser, selector: str) -> str:
    """The text of the last such element."""
    found: str = page.value(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).textContent")
    return found


class TestAnswers:
    pytestmark = in_a_browser

    def test_stream_with_figures_and_no_other_host(self, page, server):
        answer(page, "What does it say?")
        assert page.value(TEXT) == PLAIN.replace("\n\n", "\n")
        assert "tokens/s · mean accepted length" in text_of(page, ".figures")
        asked = server.asked[0]
        assert asked["messages"] == [{"role": "user", "content": "What does it say?"}]
        assert (asked["method"], asked["seed"], asked["temperature"]) == ("self", 0, 0) and "max_tokens" not in asked
        ask(page, "Second?")  # goes on with what was said
        page.until(ANSWERED)
        said = [(message["role"], message["content"]) for message in server.asked[1]["messages"]]
        assert said == [("user", "What does it say?"), ("assistant", PLAIN), ("user", "Second?")]
        assert "from the cache" in text_of(page, ".figures")
        assert not page.problems
        assert all(address.startswith(server.url) for address in page.requests)

    def test_reading_shows_from_the_first_second_and_then_how_far_it_is(self, page):
        ask(page, "slow")
        page.until("document.querySelector('progress:indeterminate')", 0.9)
        page.until("/Reading the prompt: 1 second/.test(document.querySelector('[role=status]').textContent)", 2)
        page.until("document.querySelector('progress')?.max > 1")
        page.press("Escape")
        page.until(ANSWERED)

    def test_markup_stays_text_and_code_is_set_apart(self, page):
        answer(page, "code")
        assert page.value("document.querySelectorAll('.text img, .text b').length") == 0
        assert "<b>bold</b> <img src=x" in page.value(TEXT)
        code = page.value("[...document.querySelectorAll('pre code')].map((code) => code.textContent)")
        assert len(code) == 1 and code[0].startswith("def accept") and code[0].endswith("return path\n")
        assert text_of(page, "pre button") == "Copy"
        assert not page.problems

    def test_code_is_copied_from_a_page_without_a_clipboard_and_text_runs_where_its_letters_do(self, page):
        """As on http:// names that are not this machine's."""
        page.value("void Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
        page.value("void document.addEventListener('copy', () => { window.got = document.activeElement.value; })")
        answer(page, "code \u05e9\u05dc\u05d5\u05dd")
        page.point("pre button", click=True)
        page.until("document.querySelector('pre button').textContent === 'Copied'")
        assert page.value("window.got") == text_of(page, "pre code")
        for selector in ("#question", ".question p", ".text p"):
            assert page.value(f"document.querySelector({json.dumps(selector)}).dir") == "auto"

    @pytest.mark.parametrize("composing", ["isComposing: true", "keyCode: 229"])
    def test_an_enter_that_ends_a_composition_sends_nothing(self, page, server, composing):
        page.value("document.querySelector('#question').focus()")
        page.write("nihao")
        event = f"new KeyboardEvent('keydown', {{ key: 'Enter', bubbles: true, cancelable: true, {composing} }})"
        page.value(f"document.querySelector('#question').dispatchEvent({event})")
        assert not server.asked and page.value("turns.length") == 0
        page.press("Enter")
        page.until(ANSWERED)

    def test_markdown_is_set_and_a_thought_is_folded(self, page):
        answer(page, "think")
        assert page.value("[...document.querySelectorAll('.text > h2, .text li, .text strong')].length") == 4
        link = page.value("(({href, target, rel}) => [href, target, rel])(document.querySelector('.text a'))")
        assert link == ["https://example.org/", "_blank", "noopener noreferrer"]
        assert page.value("document.querySelector('details').open") is False
        assert text_of(page, "details summary") == "Thought"
        assert text_of(page, "details em") == "this"
        # Nested code fences that arrive with their line breaks; text follows.
        assert text_of(page, "pre code") == "```\ninner\n```\n"
        assert page.value("document.querySelector('.answer > .text').lastElementChild.textContent") == "End."
        assert not page.problems

    def test_again_with_another_method_stands_beside(self, page, server):
        page.value("document.querySelector('#seed').value = 5")
        answer(page, "What?")
        page.value("document.querySelector('#method').value = 'ar'")
        press_button(page, "Again", f"{ANSWERED} && turns[0].answers.length === 2")
        first, second = server.asked
        assert second == {**first, "method": "ar"} and first["seed"] == 5
        assert "equals the first" in text_of(page, ".figures")
        left, right = page.value("[...document.querySelectorAll('.answer')].map((a) => a.getBoundingClientRect().y)")
        assert left == right

    @pytest.mark.parametrize(
        ("method", "source", "question"), [("self", "draft", "free text"), ("prompt-lookup", "lookup", PLAIN[:90])]
    )
    def test_who_wrote_it(self, page, method, source, question):
        page.value(f"document.querySelector('#method').value = '{method}'")
        page.value("document.querySelector('#max_tokens').value = 60")
        answer(page, question)
        press_button(page, "Who wrote it")
        pieces, text = page.value(f"[document.querySelector('.pieces').textContent, {LAST}.text]")
        assert text in (pieces, pieces + "\ufffd")  # a part of a character at the end
        for each in (source, "target"):
            assert page.value(f"document.querySelectorAll('.pieces .{each}').length") > 3
        page.value(f"document.querySelector('.pieces .{source}').click()")
        tree = text_of(page, ".pieces + pre").splitlines()
        drafted = int(re.search(r"(\d+) of (\d+) drafted", tree[0])[2])
        assert len(tree) == drafted + 2 and "●" in {line.strip()[0] for line in tree[1:]} <= {"●", "○"}
        press_button(page, "As text")
        page.value("document.querySelector('#method').value = 'ar'")
        press_button(page, "Again", f"{ANSWERED} && turns[0].answers.length === 2")
        assert "equals the first" in text_of(page, ".figures")
        assert not page.problems

    def test_a_question_is_edited_and_what_follows_is_replaced(self, page, server):
        page.value("addFiles([new File(['Some text.'], 'a.txt')])")
        for question in ("First?", "Second?"):
            answer(page, question)
        page.value("[...document.querySelectorAll('.question button')][0].click()")
        assert page.value("document.querySelector('#question').value") == "First?"
        page.press("Escape")
        assert page.value("document.querySelector('#question').value + documents.length + turns.length") == "02"
        page.value("[...document.querySelectorAll('.question button')][0].click()")
        page.value("document.querySelector('#question').value = ''")
        ask(page, "Other?")
        page.until(f"{ANSWERED} && turns.length === 1")
        assert server.asked[2]["messages"] == [{"role": "user", "content": "Some text.\n\nOther?"}]

    def test_an_answer_that_was_cut_goes_on(self, page, server):
        page.value("document.querySelector('#max_tokens').value = 7")
        answer(page, "What?")
        assert server.asked[0]["max_tokens"] == 7
        press_button(page, "Continue", f"{ANSWERED} && {LAST}.text.length === 14")
        assert page.value(f"{LAST}.text") == PLAIN[:14]
        assert server.asked[1]["messages"][-1] == {"role": "assistant", "content": PLAIN[:7]}

    def test_stay_when_the_page_is_loaded_again_until_a_new_chat(self, page, server):
        answer(page, "What?")
        page.open(server.url)
        page.until("document.querySelectorAll('.text p').length && document.querySelector('.answer .row button')")
        press_button(page, "New chat")
        assert page.value("document.querySelectorAll('.turn').length") == 0
        page.open(server.url)
        assert page.value("turns.length") == 0


class TestTrouble:
    pytestmark = in_a_browser

    def test_a_wrong_setting_and_a_missing_key_are_asked_for_and_the_question_is_kept(self, page, server):
        page.value("document.querySelector('#temperature').value = 9")
        ask(page, "What?")
        page.until("document.querySelector('#settings').open && document.activeElement.id === 'temperature'")
        assert not server.asked
        page.open(server.url)
        page.until("document.querySelector('#method').value === 'self'")
        server.service.settings.keys["me"] = "secret"
        ask(page, "What?")
        page.until("document.querySelector('#settings').open && document.activeElement.id === 'key'")
        assert page.value("document.querySelector('#question').value") == "What?"
        page.write("secret")
        page.press("Enter")
        page.until("!document.querySelector('#settings').open")
        page.value("document.querySelector('#send').click()")
        page.until(f"{ANSWERED} && {LAST}.state === 'done'")
        assert page.value("sessionStorage.getItem('key')") == "secret"

    @pytest.mark.parametrize(("question", "says"), [("refuse this", "9,000 tokens"), ("busy today", "waiting already")])
    def test_what_was_refused_is_in_the_box_again(self, page, server, question, says):
        page.value("addFiles([new File(['Some text.'], 'a.txt')])")
        ask(page, question)
        page.until("!running && !turns.length")
        assert page.value("document.querySelector('#question').value + documents[0].name") == f"{question}a.txt"
        assert says in text_of(page, "#notice")

    @pytest.mark.parametrize("stop", ["key", "button"])
    def test_stop(self, page, server, stop):
        ask(page, "slow")
        page.until(f"{LAST}.rounds.length > 3")
        if stop == "key":
            page.press("Escape")
        else:
            page.point("#send", click=True)
        page.until(ANSWERED)
        assert text_of(page, ".figures").startswith("Stopped · ")
        ask(page, "And?")
        page.until(f"{ANSWERED} && turns.length === 2")
        wait_until(lambda: b'status="499"} 1.0' in server.http("/metrics")[1])
        assert not page.problems

    @pytest.mark.parametrize(
        ("kind", "says"),
        [
            ("broken", "The engine failed."),
            ("gone", "The connection ended before the answer did."),
            ("drain", "The server is shutting down."),
        ],
    )
    def test_errors_are_shown_and_can_be_tried_again(self, page, server, kind, says):
        answer(page, kind)
        assert text_of(page, ".failed[role=alert]") == says
        press_button(page, "Try again", f"{ANSWERED} && turns[0].answers.length === 1")
        assert server.asked[0] == server.asked[1]


class TestFrame:
    pytestmark = in_a_browser

    def test_documents_come_before_the_question_and_others_are_said(self, page, server):
        page.value(
            "addFiles([new File(['Some text.'], 'a.txt'), new File(['\\0'], 'b.bin'), "
            "new File([new Uint8Array([0x63, 0x61, 0x66, 0xe9])], 'c.txt')])"
        )
        assert "a.txt · 0.0 kB · about 3 tokens" in text_of(page, "#documents")
        said = text_of(page, "#notice")
        assert "b.bin is not a text file" in said and "c.txt is not a text file in UTF-8" in said
        answer(page, "What?")
        assert server.asked[0]["messages"][0]["content"] == "Some text.\n\nWhat?"
        assert page.value("document.querySelector('#documents').children.length") == 0
        page.value("addFiles([new File(['word '.repeat(8000)], 'a.txt')])")
        assert text_of(page, "#context-use").endswith("of 1,200 tokens")
        assert page.value("document.querySelector('#context-use').className") == "over"  # it does not fit

    def test_a_phone_shows_all_of_it(self, page):
        page.screen(390, 800)
        answer(page, "code")
        press_button(page, "Again", f"{ANSWERED} && turns[0].answers.length === 2")
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.value(
            "[...document.querySelectorAll('main, #composer, header')].every(wide => wide.scrollWidth <= 390)"
        )
        upper, lower = page.value("[...document.querySelectorAll('.answer')].map((a) => a.getBoundingClientRect().y)")
        assert lower > upper

    def test_everything_that_takes_input_has_a_name(self, page):
        fields = "[...document.querySelectorAll('input, select, textarea')]"
        assert page.value(f"{fields}.every((field) => field.labels.length || field.ariaLabel)")
        tree = page.send("Accessibility.getFullAXTree")["nodes"]
        named = {"button", "textbox", "combobox", "group", "log", "spinbutton"}
        for node in tree:
            role = node.get("role", {}).get("value")
            if role in named and not node["ignored"]:
                assert node.get("name", {}).get("value"), node
