"""From results files to one HTML page that needs nothing else, and its charts as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import jinja2

from longdraft.bench import charts, report
from longdraft.bench.peers import PEERS
from longdraft.bench.report_chapter import Chapter
from longdraft.bench.report_parts import apart, parts
from longdraft.bench.report_words import title
from longdraft.bench.settings import REFERENCE
from longdraft.errors import CheckpointError

DEFINITIONS = (
    "spread: the slowest and the fastest of the timed rounds, each of which counts with the median of its samples; of "
    "the speed-up over ar, the samples that gain least and most.",
    "by depth: of all rounds of a method, those that accepted d drafted tokens or more.",
    "a round: draft is all that the drafter does. Verifying is the model's forward over what was drafted: its "
    "attention, which reads the context's keys and values, and the rest of it, which does not depend on the context's "
    "length. Overhead is all else: sampling tokens, keeping what was accepted. Attention of the drafted tokens to each "
    "other is in attention too; the context's share of the keys says how little that is.",
    "memory: weights are the model's; packed is their second copy, which makes products of a few rows fast on a CPU; "
    "KV is the cache of the run, with what a method keeps beside it; draft is all that the drafter holds. Peak is "
    "the largest that torch's allocator (GPU) or the process (CPU) grew to during the timed runs, whatever for.",
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
        made: when and by what the page was made.
        progress: told what takes time.

    Raises:
        CheckpointError: a file that cannot be read, is no results file, or has no measurement.
        CapabilityError: matplotlib is not installed.
    """
    charts.available()
    found = parts(paths)
    page = Page()
    names = list(dict.fromkeys(row["method"] for part in found for row in part.rows))
    look = charts.looks(sorted(names, key=lambda name: name != REFERENCE), (REFERENCE, *PEERS))
    chapters = []
    for number, part in enumerate(found, 1):
        progress(f"Drawing {number} of {len(found)}")
        chapter = Chapter(part, look, f"{number}-" if len(found) > 1 else "")
        chapters.append(chapter.content())
        page.images |= chapter.images
    page.html = _template().render(
        title="longdraft bench: " + "; ".join(dict.fromkeys(map(title, found))),
        made=made,
        chapters=chapters,
        apart=apart(found),
        definitions=[*report.DEFINITIONS, *DEFINITIONS],
    )
    return page


def _template() -> jinja2.Template:
    text = resources.files("longdraft.bench").joinpath("report.html.jinja").read_text(encoding="utf-8")
    # Everything from a file is escaped; what is not a variable of the template is an error.
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)
