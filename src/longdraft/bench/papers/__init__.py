"""Describes papers' tables as data: lines and columns in Python, the published figures in ``published.md``.
:mod:`longdraft.bench.reproduce` measures the tables.

May import: :mod:`longdraft.errors` and :mod:`longdraft.metrics`.
"""

from dataclasses import replace

from longdraft.bench.papers import longspec, specextend, specpv
from longdraft.bench.papers.table import Paper, Table
from longdraft.errors import RequestError

PAPERS: dict[str, Paper] = {
    paper.name: replace(paper, tables=tuple(replace(table, paper=paper.name) for table in paper.tables))
    for paper in (longspec.PAPER, specextend.PAPER, specpv.PAPER)
}


def get_paper(name: str) -> Paper:
    """Returns a paper by its name. Raises RequestError if there is no such paper."""
    paper = PAPERS.get(name.lower())
    if paper is None:
        raise RequestError(f"There is no paper {name!r}. Papers: {', '.join(PAPERS)}.")
    return paper


def get_table(paper: Paper, name: str) -> Table:
    """Returns a paper's table by its name, such as ``1``, ``table 1``, ``fig4`` or ``figure 4``.

    Raises:
        RequestError: longdraft has no such table of the paper.
    """
    normalized = name.lower().replace(" ", "").replace("figure", "fig").removeprefix("table")
    for table in paper.tables:
        if table.name == normalized:
            return table
    raise RequestError(f"{paper.name} has no table {name!r}. Its tables: {', '.join(t.name for t in paper.tables)}.")
