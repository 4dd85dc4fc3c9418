"""Makes one HTML page of results files; it needs no other file. The charts are PNG files beside it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2

from longdraft.bench import charts, report
from longdraft.bench.peers import PEERS
from longdraft.bench.report_chapter import Chapter
from longdraft.bench.report_parts import Part, parts
from longdraft.bench.report_words import title
from longdraft.bench.settings import REFERENCE
from longdraft.errors import CheckpointError
from longdraft.files import naming

DEFINITIONS = (
    "spread: the slowest and the fastest of the timed rounds, each of which counts with the median of its samples; of "
    "the speed-up over ar, the samples that gain least and most.",
    "by depth: of all rounds of a method, those that accepted d drafted tokens or more.",
    "a round: draft is the drafter's time. Verifying is the model's forward over the drafted tokens: its attention to "
    "the context and to each other, and the rest, which does not depend on the context's length. Overhead is all else: "
    "sampling, keeping the accepted tokens.",
    "memory: weights are the model's; the packed copy makes products of a few rows fast on a CPU; KV is the cache, "
    "with what a method keeps beside it; draft is all that the drafter holds; peak is the largest that torch's "
    "allocator (GPU) or the process (CPU) grew to during the timed runs.",
)


@dataclass
class Page:
    """The report: the page, and PNG files by name."""

    html: str = ""
    images: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Writes ``index.html`` and the charts, and returns the page's path.

        Raises:
            CheckpointError: the folder or a file cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in self.images.items():
                (folder / name).write_bytes(data)
            path = folder / "index.html"
            path.write_text(self.html, encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{folder}: the report cannot be written: {error.strerror}.") from error
        return path


def make(paths: Sequence[Path], made: str = "", progress: Callable[[str], None] = lambda what: None) -> Page:
    """The report of results files.

    Args:
        paths: files that ``longdraft bench --results`` wrote.
        made: a line about when the page was made.
        progress: called with a line of text before something long.

    Raises:
        CheckpointError: a file that cannot be read, is no results file, or has no measurement.
        CapabilityError: matplotlib is not installed.
    """
    charts.available()
    shown = ", ".join(map(str, paths))
    with naming(shown, f"No page can be made of {shown}", "It holds values that no bench writes."):
        return _page(parts(paths), made, progress)


def _page(found: Sequence[Part], made: str, progress: Callable[[str], None]) -> Page:
    page = Page()
    names = list(dict.fromkeys(row["method"] for part in found for row in part.rows))
    style = charts.styles(sorted(names, key=lambda name: name != REFERENCE), (REFERENCE, *PEERS))
    chapters = []
    for number, part in enumerate(found, 1):
        progress(f"Drawing {number} of {len(found)}")
        chapter = Chapter(part, style, f"{number}-" if len(found) > 1 else "")
        chapters.append(chapter.content())
        page.images |= chapter.images
    page.html = _template().render(
        title="longdraft bench: " + "; ".join(dict.fromkeys(map(title, found))),
        made=made,
        chapters=chapters,
        colours={name: own["color"] for name, own in style.items()},
        definitions=[*report.DEFINITIONS, *DEFINITIONS],
    )
    return page


def _template() -> jinja2.Template:
    text = resources.files("longdraft.bench").joinpath("report.html.jinja").read_text(encoding="utf-8")
    # Everything from a file is escaped; what is not a variable of the template is an error.
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
