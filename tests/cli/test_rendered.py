"""Measurements as files for people: the page, Markdown and figures."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")
VOID = {"meta", "br", "wbr"}


class Page(HTMLParser):
    """What a page is made of: its text, and that its tags close and nothing is loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open and "script" not in self.tags

    def handle_starttag(self, tag, attributes):
        assert not {name for name, _ in attributes} & {"src", "srcset", "action"}
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def page_of(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_a_run_in_every_form(shell, model_folder, tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [{"text": "one two three one two three one two", "dataset": name} for name in ("a/b", "c|<i>")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    forms = {name: tmp_path / f"r.{name}" for name in ("markdown", "html", "svg")}
    given = [word for name, path in forms.items() for word in (f"--{name}", path)]
    ended = shell(
        "bench", "--model", model_folder, "--data", data, "-n", 8, "--repeats", 1, "--methods", "prompt-lookup,hf",
        "--profile", "--ignore-eos", "--json", *given,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = {row["method"]: row for row in json.loads(ended.out.splitlines()[-1])["rows"]}
    assert set(found["ar"]["profile"]) == {"seconds", "prefix_share", "memory"} and "profile" not in found["hf"]
    # Every form shows the same table.
    shown = f"{found['prompt-lookup']['mean_accepted_length']:.2f}"
    markdown = forms["markdown"].read_text()
    assert "| method | tokens/s | vs ar |" in markdown and "- tokens/s: new tokens" in markdown
    assert shown in markdown and shown in page_of(forms["html"]).text and shown in ended.out
    assert "c|<i>: 1 sample" in page_of(forms["html"]).text and "verify: attention" in ended.out
    drawn = [path.read_bytes() for path in tmp_path.glob("r-*.svg")]
    assert len(drawn) == 2 and all(image.startswith(b"<?xml") for image in drawn)


def test_files_that_cannot_be_written_are_refused_first(shell, tmp_path):
    for form in ("markdown", "html", "svg", "results"):
        ended = shell("bench", "acceptance", f"--{form}", tmp_path / "none" / "x")
        assert ended.code == 1 and f"--{form}" in ended.err
