"""Measurements as files for people: the page, Markdown and figures, of runs and of files of earlier versions."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from tests.bench.results_files import header, line, write

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


def test_a_page_of_results_files_of_earlier_versions(shell, tmp_path):
    """They may have trees in their profiles, settings that there are no longer, and any text in their names."""
    name = "longspec:draft=<b>$x$</b>"
    seconds = {"ar": 4.0, name: 2.0}
    profile = {
        "rounds": 8,
        "seconds": {"draft": 0.01, "attention": 0.02, "forward": 0.05, "rest": 0.001},
        "prefix_share": 0.97,
        "memory": {"weights": 2**29, "kv": 2**25},
        "tree": {"tokens": [" the"]},
    }
    first = write(
        tmp_path / "run.jsonl",
        header(("ar", name), settings={"snapshots": None}),
        *(line(seconds, context, profiles={name: profile}) for context in (1024, 4096)),
    )
    second = write(tmp_path / "other.jsonl", header(("ar",)), line({"ar": 4.0}, None))
    ended = shell("bench", "report", first, second, "--json")
    assert ended.code == 0, ended.err
    page = page_of(tmp_path / "run.html")
    assert json.loads(ended.out) == {"page": str(tmp_path / "run.html")}
    assert "b" not in page.tags and page.tags.count("svg") == 2 and page.tags.count("table") == 2 + 2 + 1
    for said in (
        name, "2.00x", "10.00 ms", "97%", "512.0 MiB", "news: 1 sample, 777 prompt tokens", "A Processor",
        "longdraft bench --data file.jsonl", "2026-01-02", "tokens/s: new tokens / decode seconds",
    ):  # fmt: skip
        assert said in page.text, said


DAMAGED = line({"ar": 4.0}, profiles={"ar": {"seconds": {"draft": "x"}}})  # values that no bench writes


@pytest.mark.parametrize("lines", [None, [{}], [header()], [header(("ar",)), DAMAGED]])
def test_a_file_that_is_none(shell, tmp_path, lines):
    if lines is not None:
        write(tmp_path / "x.jsonl", *lines)
    ended = shell("bench", "report", tmp_path / "x.jsonl")
    assert ended.code == 1 and "x.jsonl" in ended.err and not (tmp_path / "x.html").exists()


def test_a_round_that_accepted_more_than_any_tree_has_ends_with_a_page(shell, tmp_path):
    damaged = line({"ar": 4.0, "longspec": 2.0})
    damaged["rounds"]["longspec"][0]["accepted"][0][0] = 10**80
    ended = shell("bench", "report", write(tmp_path / "x.jsonl", header(("ar", "longspec")), damaged))
    assert ended.code == 0 and (tmp_path / "x.html").exists()


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
