"""The report of results files: one page that needs nothing else, whatever stands in them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from longdraft.bench import charts, html_report
from longdraft.errors import CapabilityError, CheckpointError
from tests.bench.results_files import MACHINE, PROFILE, header, line, write

SECONDS = {"ar": 4.0, "longspec": 2.0, "hf": 5.0}
VOID = {"meta", "source", "img", "link", "br", "wbr"}


class Page(HTMLParser):
    """What a page is made of: its text, what it loads, and whether its tags close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.heads: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)
        if self.open[-1:] == ["th"]:
            self.heads.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def made(*paths):
    report = html_report.make(list(paths), "made by a test")
    page = Page(report.html)
    # The page loads nothing: no address outside, no script.
    assert not page.loads
    assert "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"@import|url\((?!#)", report.html)
    assert all(data.startswith(b"\x89PNG") for data in report.images.values())
    return report, page


@pytest.fixture
def undrawn(monkeypatch):
    """Charts are asked for and not drawn, which takes a second a page."""
    monkeypatch.setattr(charts, "image", lambda figure, form: b"\x89PNG")
    monkeypatch.setattr(charts, "inline", lambda figure: "<svg></svg>")
    for name in ("lines", "stacked", "grouped"):
        monkeypatch.setattr(charts, name, lambda *_, **__: None)


@pytest.fixture
def results(tmp_path):
    """Two data sets, two contexts, profiles."""
    lines = [
        line(
            SECONDS,
            context,
            dataset,
            f"{dataset}.jsonl:1",
            profiles={"ar": PROFILE | {"tree": None}, "longspec": PROFILE},
        )
        for dataset in ("news", "talks")
        for context in (1024, 4096)
    ]
    return write(tmp_path / "r.jsonl", header(), *lines)


def test_the_whole_page(results, tmp_path):
    report, page = made(results)
    assert (
        "longspec is faster than plain decoding (ar) on all 4 prompts: 2.00x its speed; 2.50x that of "
        "transformers' generate (hf)." in page.text
    )
    facts = (
        "4 prompts of 1,024 to 4,096 tokens",
        "Model-1B, float32, cpu",
        "A Processor, 2 cores",
        "torch 2.11",
        "repeats 2",
    )
    for said in ("made by a test", "longdraft bench --data file.jsonl", "2026-01-02", *facts):
        assert said in page.text
    assert "Every output of longspec, hf is that of ar" in page.text
    assert "1 of 3 drafted tokens accepted" in page.text and "·<b>dog</b>" in page.text
    for definition in (*html_report.report.DEFINITIONS, *html_report.DEFINITIONS):
        assert definition in page.text
    # Two data sets: speed, speed-up, accepted length, a round; and one chart over all prompts.
    assert len(report.images) == 2 * 4 + 1
    path = report.write(tmp_path / "new" / "folder")
    assert path.name == "index.html" and len(list(path.parent.glob("*.png"))) == 9


@pytest.mark.usefixtures("undrawn")
def test_one_method_one_context_no_hf(tmp_path):
    report, page = made(write(tmp_path / "r.jsonl", header(("ar",)), line({"ar": 4.0}, None)))
    assert "Plain decoding (ar)." in page.text and "1 prompt of 777 tokens" in page.text
    assert "Nothing to compare" in page.text
    assert list(report.images) == ["tokens-s-news.png"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (
            (4.2, 2.65),
            "longspec is faster than plain decoding (ar) on 1 of 2 prompts, slower on 1: 0.95x and 1.51x its",
        ),
        (
            (2.0, 4.0, 4.04, 3.0),
            "faster than plain decoding (ar) on 2 of 4 prompts, slower on none: 0.99x to 2.00x (median 1.17x)",
        ),
        ((8.0,), "No exact method is faster than plain decoding (ar) here: longspec comes nearest, at 0.50x"),
        ((5.0, 5.0, 3.5), "comes nearest, faster on 1 of 3 prompts, slower on 2, at 0.80x to 1.14x (median 0.80x)"),
    ],
)
def test_the_headline_counts_wins_and_losses(tmp_path, seconds, said):
    """A median alone says of a win and a loss that there are two wins."""
    lines = [line({"ar": 4.0, "longspec": s}, sample=f"a:{i}") for i, s in enumerate(seconds)]
    _, page = made(write(tmp_path / "r.jsonl", header(("ar", "longspec")), *lines))
    assert said in page.text
    assert len(seconds) == 1 or f"{4 / max(seconds):.2f}\N{EN DASH}{4 / min(seconds):.2f}" in page.text  # in the table


@pytest.mark.usefixtures("undrawn")
def test_a_method_that_met_some_of_the_prompts_is_no_headline(tmp_path):
    files = [
        write(tmp_path / f"{i}.jsonl", header(tuple(s)), line(s, 1024 * i))
        for i, s in ((1, {"ar": 4.0, "longspec": 3.0}), (2, {"ar": 4.0, "longspec": 3.0, "eagle3": 1.0}))
    ]
    assert "longspec is faster than plain decoding (ar) on all 2 prompts" in made(*files)[1].text


@pytest.mark.usefixtures("undrawn")
def test_empty_columns_go(tmp_path):
    """No hf, no profile, one round, one prompt, prompts that came from a cache."""
    found = line({"ar": 4.0, "longspec": 2.0}, cold={}, peak_memory_bytes={})
    found["rounds"] = {name: runs[:1] for name, runs in found["rounds"].items()}
    _, page = made(write(tmp_path / "r.jsonl", header(("ar", "longspec")), found))
    heads = page.heads
    assert heads == ["method", "context", "tokens/s", "vs ar", "accepted", "prompts", "differ"]


@pytest.mark.usefixtures("undrawn")
def test_an_approximate_method_is_no_headline(tmp_path):
    names = ("ar", "longspec", "specpv")
    path = write(tmp_path / "r.jsonl", header(names), line({"ar": 4.0, "longspec": 3.0, "specpv": 1.0}))
    _, page = made(path)
    assert "longspec decodes at 1.33x" in page.text
    assert "Not compared: specpv" in page.text and "not comparable" in page.text


@pytest.mark.usefixtures("undrawn")
def test_what_is_missing_is_left_out(tmp_path):
    bare = {"format": "longdraft-bench", "version": 1}
    found = line(SECONDS, None, peak_memory_bytes={}, cold={})
    for runs in found["rounds"].values():
        for run in runs:
            run["accepted"] = []
    profiles = {"longspec": {**PROFILE, "prefix_share": None, "tree": {**PROFILE["tree"], "log_probs": None}}}
    _, page = made(
        write(tmp_path / "r.jsonl", bare, found),
        write(tmp_path / "s.jsonl", header(), line(SECONDS, profiles=profiles)),
    )
    assert "longspec decodes at 2.00x" in page.text and "a model" in page.text


def test_everything_from_a_file_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    names = ("ar", f"longspec{evil}")
    differences = [
        {
            "method": names[1], "dataset": evil, "sample": evil, "position": 3, "token": 1, "reference": None,
            "gap": None, "near_tie": False,
        }
    ]  # fmt: skip
    tree = PROFILE["tree"] | {"tokens": [evil] * 4, "bonus": evil}
    head = header(
        names, model={"name": evil, "dtype": evil}, hardware=MACHINE | {"cpu": evil}, versions={evil: evil},
        command=evil, created=evil, notes={evil: evil},
    )  # fmt: skip
    found = line(
        {names[0]: 4.0, names[1]: 2.0}, 1024, evil, evil, differences=differences,
        profiles={names[1]: PROFILE | {"tree": tree}},
    )  # fmt: skip
    report, page = made(write(tmp_path / "r.jsonl", head, found))
    assert "<script" not in report.html and evil in page.text
    assert "Mismatch: " in page.text
    assert all(re.fullmatch(r"[a-z0-9-]+\.png", name) for name in report.images)


@pytest.mark.usefixtures("undrawn")
def test_near_ties_are_listed_behind_mismatches(tmp_path):
    base = {"method": "longspec", "dataset": "news", "position": 3, "token": 1, "reference": 2}
    near = base | {"sample": "a:1", "gap": 1e-4, "near_tie": True}
    mismatch = base | {"sample": "b:2", "gap": 0.5, "near_tie": False}
    _, page = made(
        write(
            tmp_path / "r.jsonl", header(), line(SECONDS, sample="a:1", differences=[near]),
            line(SECONDS, sample="b:2", differences=[mismatch]),
        )
    )  # fmt: skip
    assert page.text.index("Mismatch: longspec on b:2") < page.text.index("Near tie: longspec on a:1")


@pytest.mark.usefixtures("undrawn")
def test_files_of_one_machine_are_one_chapter(tmp_path):
    paths = [
        write(
            tmp_path / f"{context}.jsonl",
            header(hardware=MACHINE | {"memory_available_bytes": context}),
            line(SECONDS, context),
        )
        for context in (1024, 2048)
    ]
    _, page = made(*paths)
    assert "chapter" not in page.text and "2 prompts of 1,024 to 2,048 tokens" in page.text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "over",
    [
        {"settings": {"options": {"longspec": {"nodes": 8}}}},
        {"hardware": MACHINE | {"cpu": "Another"}},
        {"model": {"name": "other", "dtype": "bfloat16"}},
        {"settings": {"max_tokens": 32}},
        {"hardware": {}, "versions": {}},
        {},
    ],
)
def test_what_cannot_be_set_beside_each_other_is_kept_apart(tmp_path, over):
    """Nor two measurements of the same prompts."""
    paths = [
        write(tmp_path / "a.jsonl", header(), line(SECONDS)),
        write(tmp_path / "b.jsonl", header(**over), line(SECONDS, 2048 if over else 1024)),
    ]
    report, page = made(*paths)
    assert "2 measurements that cannot be set beside each other" in page.text
    assert "1-tokens-s-news.png" in report.images and "2-tokens-s-news.png" in report.images


HEADER = '{"format": "longdraft-bench", "version": 1}\n'


@pytest.mark.parametrize("content", [None, "", "no json\n", HEADER, HEADER + '{"dataset": 3}\n'])
def test_a_broken_file(tmp_path, content):
    path = tmp_path / "r.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError):
        html_report.make([path])


@pytest.mark.parametrize(
    "profile",
    [
        {},
        "text",
        PROFILE | {"seconds": {"draft": "long"}},
        PROFILE | {"tree": PROFILE["tree"] | {"parents": [0, 0, 0, 1]}},
        PROFILE | {"tree": PROFILE["tree"] | {"path": [0, 9]}},
    ],
)
def test_a_broken_profile(tmp_path, profile):
    path = write(tmp_path / "r.jsonl", header(), line(SECONDS, profiles={"longspec": profile}))
    with pytest.raises(CheckpointError, match=r"r\.jsonl"):
        html_report.make([path])


def test_a_folder_that_cannot_be_written(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        html_report.Page("x").write(tmp_path / "file" / "out")


def test_without_matplotlib(results, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(CapabilityError, match=r"longdraft\[report\]"):
        html_report.make([results])


def test_methods_look_different():
    names = ["ar", "hf", *(f"m{i}" for i in range(12))]
    style = charts.styles(names, ("ar", "hf"))
    assert list(style) == names
    assert len({tuple(x.values()) for x in style.values()}) == len(names)
    # A method looks the same whoever else is there, as long as their order is.
    assert style["m0"] == charts.styles(["ar", "m0"], ("ar", "hf"))["m0"]


NAMES = ["ar", "longspec", *(f"self:view=chunks:budget={n}:view_dtype=int8:lookup=true" for n in (1024, 2048, 4096))]


@pytest.mark.parametrize("contexts", [1, 3])
def test_charts_have_room_beside_long_names(contexts):
    series = {name: [charts.Point(1000.0 * (i + 1), 1.0, 0.9, 1.2) for i in range(contexts)] for name in NAMES}
    figure = charts.lines("A title", series, charts.styles(NAMES, ("ar",)), "x", "y", reference=1.0)
    figure.draw_without_rendering()
    width, height = figure.axes[0].get_window_extent().size / figure.dpi
    assert width > 0.5 * charts.INCHES_WIDE and height > 1.5


def test_nothing_crosses_the_numbers_beside_bars():
    """Nor the line of the reference, which 0.95 would stand on."""
    series = {name: [charts.Point(1.0, y, y - 0.1, y + 0.1)] for name, y in zip("abc", (0.95, 1.5, 0.2), strict=True)}
    figure = charts.lines("t", series, charts.styles(list("abc")), "x", "y", reference=1.0)
    figure.draw_without_rendering()
    right = figure.axes[0].get_window_extent().x1
    texts = [t for t in figure.axes[0].texts if t.get_text() in ("0.95", "1.50", "0.20")]
    assert len(texts) == 3 and all(t.get_window_extent().x0 > right for t in texts)


def test_a_chart_in_a_page_has_the_pages_colours():
    chart = charts.lines("$x$ <b>", {"a": [charts.Point(1, 2.0)]}, charts.styles(["a"]), "x", "y")
    drawn = charts.inline(chart)
    assert drawn.startswith("<svg") and "currentColor" in drawn and charts.INK not in drawn
    assert "$x$ &lt;b&gt;</text>" in drawn and 'opacity: 0"' in drawn
