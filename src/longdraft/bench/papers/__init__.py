"""Papers' tables as data, a file a paper; :mod:`longdraft.bench.reproduce` measures them.

May import: nothing but :mod:`longdraft.errors` and each other.
"""

from longdraft.bench.papers import eagle3, longspec, magicdec, specextend, specpv, tokenswift, triforce
from longdraft.bench.papers.table import Paper, Table
from longdraft.errors import RequestError

PAPERS: dict[str, Paper] = {
    module.PAPER.name: module.PAPER for module in (longspec, specextend, specpv, magicdec, triforce, tokenswift, eagle3)
}


def paper_named(name: str) -> Paper:
    """Raises RequestError for a paper that is not here."""
    found = PAPERS.get(name.lower())
    if found is None:
        raise RequestError(f"There is no paper {name!r}. Papers: {', '.join(PAPERS)}.")
    return found


def table_of(paper: Paper, name: str) -> Table:
    """A paper's table by its name: ``1``, ``table 1``, ``fig4``, ``figure 4``.

    Raises:
        RequestError: the paper has no such table here.
    """
    wanted = name.lower().replace(" ", "").replace("figure", "fig").removeprefix("table")
    for table in paper.tables:
        if table.name == wanted:
            return table
    raise RequestError(
        f"{paper.name} has no table {name!r} here. Its tables: {', '.join(t.name for t in paper.tables)}."
    )
