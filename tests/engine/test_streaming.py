"""The text that may be shown, token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longdraft.engine.streaming import Detokenizer, TextDelta, TextStream


def decode_bytes(tokens: list[int]) -> str:
    """A byte-level tokenizer: one token a byte, as for characters that a vocabulary lacks."""
    return bytes(tokens).decode("utf-8", errors="replace")


def decode_words(tokens: list[int]) -> str:
    """As SentencePiece writes: a space before each word but the first of what is decoded."""
    return " ".join("abcdefghij"[t] * 2 for t in tokens)


def text_of(pieces: list[TextDelta]) -> str:
    return "".join(piece.text for piece in pieces)


def test_characters_of_several_tokens_wait_and_what_is_broken_holds_nothing_up():
    for data, pieces, end in (
        ("é🙂".encode(), ["", "é", "", "", "", "🙂"], ""), (b"a\xf0", ["a", ""], "\ufffd"),
        (b"\xf0ab", ["", "\ufffda", "b"], ""),
    ):  # fmt: skip
        tokens = Detokenizer(decode_bytes)
        assert [tokens.push(byte) for byte in data] == pieces and [tokens.finish(), tokens.finish()] == [end, ""]
    tokens = Detokenizer(decode_words)
    assert [tokens.push(t) for t in (0, 1, 2)] == ["aa", " bb", " cc"]


@given(st.text(max_size=24), st.lists(st.integers(1, 5), max_size=24))
def test_the_pieces_make_the_whole_text(text, sizes):
    data = list(text.encode("utf-8", errors="ignore"))
    stream, shown = TextStream(decode_bytes), ""
    for size in [*sizes, len(data)]:
        shown += text_of(stream.push(data[:size], 0))
        data = data[size:]
    assert shown + text_of(stream.push([], 0, is_last=True)) == text


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_nothing_from_a_stop_string_on_is_shown(text, stops):
    stream, shown = TextStream(decode_bytes, stops), ""
    for byte in text.encode():
        shown += text_of(stream.push([byte], 0))
    shown += text_of(stream.push([], 0, is_last=True))
    ends = [text.find(stop) for stop in stops if stop in text]
    if not ends:
        assert shown == text
    else:  # what ends first is found first, and the engine stops there
        first = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        assert shown == text[: min(e for e in ends if any(text[e:first].startswith(s) for s in stops))]


def test_the_beginning_of_a_stop_string_is_held_until_it_is_clear():
    stream = TextStream(decode_bytes, ["STOP"])
    assert text_of(stream.push(list(b"xST"), 0)) == "x"
    assert text_of(stream.push(list(b"AR"), 0)) == "STAR"
    assert text_of(stream.push(list(b"ST"), 0)) == ""
    assert text_of(stream.push(list(b"OPxyz"), 0)) == ""
    assert stream.push([], 0, is_last=True) == []


def test_drafted_tokens_are_told_from_the_others():
    """A character counts for the token that completes it."""
    assert TextStream(decode_bytes).push(list(b"abc"), 2) == [("a", True), ("b", True), ("c", False)]
    assert TextStream(decode_bytes).push(list("é".encode()), 1) == [("é", False)]
