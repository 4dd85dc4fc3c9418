"""The page at ``/``, in headless Chromium, against canned answers: what a user sees, with the mouse and without."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.serve.browser import CHROMIUM, Browser
from tests.serve.page_server import METHODS, PAGE, PLAIN, CannedServer

in_a_browser = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
LAST = "turns.at(-1).answers.at(-1)"
ANSWERED = "turns.length && !running"


def test_the_page_is_one_file_that_needs_no_other_host_and_writes_no_markup():
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| src=", page)
    assert "default-src 'none'" in page and "connect-src 'self'" in page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with CannedServer() as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: CannedServer) -> Browser:
    """The page, loaded; a port of its own is an origin of its own: nothing is left of the test before."""
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


def press_button(page: Browser, name: str) -> None:
    page.value(f"[...document.querySelectorAll('button')].find((b) => b.textContent === {json.dumps(name)}).click()")


class TestAnswers:
    pytestmark = in_a_browser

    def test_stream_in_the_colours_of_who_proposed_them_with_the_tree_of_the_last_round(self, page, server):
        ask(page, "What does it say?")
        page.until(ANSWERED)
        assert page.value("[...document.querySelectorAll('.line')].map((l) => l.textContent).join('\\n')") == PLAIN
        for source in ("lookup", "draft", "target"):
            assert page.value(f"document.querySelectorAll('.text .{source}').length") > 3
        page.until("document.querySelector('#tree .accepted circle')")
        assert "tokens/s · mean accepted length" in page.value("document.querySelector('#figures').textContent")
        assert "6,144 from the cache" in page.value("document.querySelector('.figures').textContent")
        asked = server.asked[0]
        assert asked["messages"] == [{"role": "user", "content": "What does it say?"}]
        assert (asked["method"], asked["seed"], asked["temperature"]) == ("self", 0, 0)
        assert not page.problems
        assert all(address.startswith(server.url) for address in page.requests)

    def test_a_conversation_goes_on_with_what_was_said(self, page, server):
        for question in ("First?", "Second?"):
            ask(page, question)
            page.until(ANSWERED)
        said = [(message["role"], message["content"]) for message in server.asked[1]["messages"]]
        assert said == [("user", "First?"), ("assistant", PLAIN), ("user", "Second?")]

    def test_the_prompt_shows_how_far_it_is_read(self, page):
        ask(page, "slow")
        page.until("document.querySelector('progress')?.max === 7000")
        page.press("Escape")
        page.until(ANSWERED)

    def test_markup_stays_text_and_code_is_set_apart(self, page):
        ask(page, "code")
        page.until(ANSWERED)
        assert page.value("document.querySelectorAll('.text img, .text b').length") == 0
        code = page.value("[...document.querySelectorAll('.code:not(.fence)')].map((l) => l.textContent)")
        assert len(code) == 5 and code[0].startswith("def accept")
        assert not page.problems

    def test_another_method_stands_beside_with_the_same_seed(self, page, server):
        page.value("document.querySelector('#seed').value = 5")
        ask(page, "What?")
        page.until(ANSWERED)
        press_button(page, "ar")
        page.until(f"{ANSWERED} && turns[0].answers.length === 2")
        first, second = server.asked
        assert second == {**first, "method": "ar"} and first["seed"] == 5
        compared = page.value("document.querySelector('.compared').textContent")
        assert re.match(r"All \d+ tokens agree\. 0\.25 times the tokens/s of self\.", compared)
        left, right = page.value("[...document.querySelectorAll('.answer')].map((a) => a.getBoundingClientRect().y)")
        assert left == right

    def test_where_methods_part_is_said(self, page):
        ask(page, "part")
        page.until(ANSWERED)
        press_button(page, METHODS[2])
        page.until(f"{ANSWERED} && turns[0].answers.length === 2")
        compared = page.value("document.querySelector('.compared').textContent")
        assert re.match(r'They part at token \d+: "third drafts', compared)

    def test_stay_when_the_page_is_loaded_again_until_a_new_chat(self, page, server):
        ask(page, "What?")
        page.until(ANSWERED)
        page.open(server.url)
        page.until("document.querySelectorAll('.text .draft').length && document.querySelector('.menu button')")
        press_button(page, "New chat")
        assert page.value("document.querySelectorAll('.turn').length") == 0
        page.open(server.url)
        assert page.value("turns.length") == 0


class TestRounds:
    pytestmark = in_a_browser

    def test_the_tree_under_the_mouse(self, page):
        ask(page, "What?")
        page.until(ANSWERED)
        page.point(".text [data-round='2']")
        page.until("document.querySelector('#told').textContent.startsWith('Round 2 of')")
        tree = page.value("turns[0].answers[0].rounds[2].tree")
        # Its nodes, and the target's own token at the end of the accepted path.
        assert page.value("document.querySelectorAll('#tree circle').length") == len(tree["tokens"]) + 1
        assert page.value("document.querySelectorAll('#tree .accepted circle').length") == len(tree["accepted"]) + 1
        page.point("h1")
        page.until("!document.querySelector('#told').textContent.startsWith('Round 2 of')")
        page.point(".text [data-round='2']", click=True)
        page.point("h1")
        page.until("document.querySelector('#told').textContent.startsWith('Round 2 of')")

    def test_the_tree_under_the_mouse_stays_while_the_answer_streams(self, page):
        ask(page, "slow")
        page.until(f"{LAST}.rounds.length > 3")
        page.point(".text [data-round='2']")
        page.until(f"{LAST}.rounds.length > 8")
        assert page.value("document.querySelector('#told').textContent").startswith("Round 2 of")
        page.point("h1")
        page.until("Number(document.querySelector('#told').textContent.split(' ')[1]) > 8")
        page.press("Escape")
        page.until(ANSWERED)

    def test_the_keyboard_reaches_every_round(self, page):
        ask(page, "What?")
        page.until(ANSWERED)
        for _ in range(12):
            page.press("Tab", shift=True)
            if page.value("document.activeElement.className") == "text":
                break
        assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        last = page.value(f"{LAST}.rounds.at(-1).round")
        for key, shown in (
            ("ArrowLeft", f"Round {last - 1} of {last}"),
            ("ArrowLeft", f"Round {last - 2} of {last}"),
            ("Home", "The first token"),
            ("ArrowRight", f"Round 1 of {last}"),
        ):
            page.press(key)
            page.until(f"document.querySelector('#told').textContent.startsWith('{shown}')")
        assert page.value("document.querySelectorAll('.chosen').length") > 0

    def test_enter_sends_and_shift_enter_starts_a_line(self, page, server):
        page.write("one")
        page.press("Enter", shift=True)
        page.write("two")
        page.press("Enter")
        page.until(ANSWERED)
        assert server.asked[0]["messages"][0]["content"] == "one\ntwo"


class TestTrouble:
    pytestmark = in_a_browser

    def test_a_key_is_asked_for_and_sent(self, page, server):
        server.key = "secret"
        ask(page, "What?")
        page.until("document.querySelector('#settings').open && document.activeElement.id === 'key'")
        page.write("secret")
        page.press("Enter")
        page.until("!document.querySelector('#settings').open")
        press_button(page, "Try again")
        page.until(f"{ANSWERED} && {LAST}.state === 'done'")
        assert page.value("sessionStorage.getItem('key')") == "secret"

    def test_a_busy_server_is_asked_again(self, page, server):
        ask(page, "busy")
        page.until("document.querySelector('.answer [role=status]').textContent.includes('Asking again in 1 second')")
        page.until(f"{ANSWERED} && {LAST}.state === 'done'")
        assert len(server.asked) == 2

    @pytest.mark.parametrize("stop", ["key", "button"])
    def test_stop(self, page, server, stop):
        ask(page, "slow")
        page.until(f"{LAST}.rounds.length > 3")
        if stop == "key":
            page.press("Escape")
        else:
            page.point("#send", click=True)
        page.until(ANSWERED)
        assert page.value("document.querySelector('.figures').textContent").startswith("Stopped · ")
        ask(page, "And?")
        page.until(f"{ANSWERED} && turns.length === 2")
        assert server.left == 1 and not page.problems

    def test_a_new_chat_stops_the_old_one(self, page, server):
        ask(page, "slow")
        page.until(f"{LAST}.rounds.length > 3")
        press_button(page, "New chat")
        page.until("!running")
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
        ask(page, kind)
        page.until(ANSWERED)
        assert page.value("document.querySelector('.failed[role=alert]:not(#settings-notice)').textContent") == says
        press_button(page, "Try again")
        page.until(ANSWERED)
        assert server.asked[0] == server.asked[1]

    def test_a_wrong_setting_is_shown_and_nothing_is_sent(self, page, server):
        page.value("document.querySelector('#temperature').value = 9")
        ask(page, "What?")
        page.until("document.querySelector('#settings').open && document.activeElement.id === 'temperature'")
        assert not server.asked


class TestFrame:
    pytestmark = in_a_browser

    def test_documents_come_before_the_question(self, page, server):
        page.value("addFiles([new File(['Some text.'], 'a.txt'), new File(['\\0'], 'b.bin')])")
        assert "a.txt · 10 B · about 3 tokens" in page.value("document.querySelector('#documents').textContent")
        assert page.value("document.querySelector('#notice').textContent") == "b.bin is not a text file."
        ask(page, "What?")
        page.until(ANSWERED)
        assert server.asked[0]["messages"][0]["content"] == "Some text.\n\nWhat?"
        assert page.value("document.querySelector('#documents').children.length") == 0

    def test_more_than_the_model_takes_is_shown(self, page):
        page.value("addFiles([new File(['word '.repeat(8000)], 'a.txt')])")
        assert page.value("document.querySelector('#room').textContent") == "about 10,001 of 8,192 tokens"
        assert page.value("document.querySelector('#room').className") == "over"

    @pytest.mark.parametrize("dark", [False, True])
    def test_a_phone_shows_all_of_it(self, page, dark):
        page.screen(390, 800, dark)
        ask(page, "code")
        page.until(ANSWERED)
        press_button(page, "ar")
        page.until(f"{ANSWERED} && turns[0].answers.length === 2")
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.value(
            "[...document.querySelectorAll('main, #composer, header')].every(wide => wide.scrollWidth <= 390)"
        )
        upper, lower = page.value("[...document.querySelectorAll('.answer')].map((a) => a.getBoundingClientRect().y)")
        assert lower > upper

    def test_dark_and_light_can_be_switched_and_are_kept(self, page, server):
        backs = []
        for dark in (False, True):
            page.screen(1280, 850, dark)
            backs.append(page.value("getComputedStyle(document.body).backgroundColor"))
        press_button(page, "◐")
        assert page.value("getComputedStyle(document.body).backgroundColor") == backs[0] != backs[1]
        page.open(server.url)
        assert page.value("getComputedStyle(document.body).backgroundColor") == backs[0]

    def test_everything_that_takes_input_has_a_name(self, page):
        assert page.value(
            "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length).length"
        ) == 0  # fmt: skip
        tree = page.send("Accessibility.getFullAXTree")["nodes"]
        named = {"button", "textbox", "combobox", "group", "log", "spinbutton"}
        for node in tree:
            role = node.get("role", {}).get("value")
            if role in named and not node["ignored"]:
                assert node.get("name", {}).get("value"), node


class TestServer:
    """The server itself, of a tiny model: the page reads what it writes."""

    pytestmark = in_a_browser

    def test_answers_with_trees_and_figures_that_agree_with_plain_decoding(self, browser, running):
        browser.screen(1280, 850)
        browser.open(running.url)
        browser.until("document.querySelector('#method').value === 'prompt-lookup'")
        browser.value("document.querySelector('#max_tokens').value = 60")
        browser.problems.clear()
        ask(browser, "the sea the sea the sea the sea the sea")
        browser.until(ANSWERED)
        assert browser.value(f"{LAST}.state") == "done"
        # Every piece of text came with the round that wrote it.
        assert browser.value("document.querySelectorAll('.plain').length") == 0
        assert browser.value(f"{LAST}.rounds.at(-1).round") > 0
        press_button(browser, "ar")
        browser.until(f"{ANSWERED} && turns[0].answers.length === 2")
        assert re.match(r"All \d+ tokens? agree", browser.value("document.querySelector('.compared').textContent"))
        assert not browser.problems
