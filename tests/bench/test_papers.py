"""Papers' tables as data: they parse, their names exist, and their figures agree with the papers' texts."""

from __future__ import annotations

import pytest

from longdraft.bench import tasks
from longdraft.bench.papers import PAPERS, get_paper, get_table
from longdraft.bench.papers.table import FIGURES
from longdraft.bench.peers import PEERS
from longdraft.bench.quality import FULL
from longdraft.bench.reproduce.measures import mean_part_ms
from longdraft.bench.reproduce.scaled import ScaledTable
from longdraft.errors import RequestError
from longdraft.registry import METHODS

TABLES = [(paper, table) for paper in PAPERS.values() for table in paper.tables]
each_table = pytest.mark.parametrize(("paper", "table"), TABLES, ids=lambda x: getattr(x, "name", ""))


@each_table
def test_a_table_names_what_exists(paper, table):
    known = {*METHODS, *PEERS, FULL}
    assert {line.method for line in table.lines} <= known and set(table.datasets) <= tasks.TASKS.keys()
    assert set(table.figures) <= FIGURES.keys()
    lines, columns = [line.name for line in table.lines], [column.name for column in table.columns]
    assert len({*lines}) == len(lines) and len({*columns}) == len(columns)
    assert table.baseline in known | {*lines}
    for _, line, column, _ in table.published:
        assert line in lines and column in columns
    for line, column in table.cells():
        if table.kind in ("speed", "quality") and line.method in METHODS:
            known, options = METHODS[line.method], ScaledTable(table, is_small=True).options(line, column)
            known.check_options(options)
            known.verifier(**{name: options[name] for name in known.verifier_options if name in options})


@pytest.mark.parametrize(
    ("paper", "table", "key", "figure"),
    [
        ("longspec", "1", ("LC-13B", "LongSpec", "RepoBench-P", "tokens_per_second"), 96.96),
        ("longspec", "4", ("LC-7B", "LongSpec", "25k-32k", "rest_ms"), 6.28),
        ("specextend", "2", ("LC-7B", "EAGLE, Yes", "BookSum 16K", "speedup"), 2.84),
        ("specextend", "5", ("V-7B", "EAGLE, retrieval", "top-k 256", "tokens_per_second"), 32.48),
        ("specpv", "1", ("L-8B", "SpecPV-2K", "60K", "speedup"), 6.29),
        ("specpv", "3", ("14B", "SpecPV-4K", "50K", "accepted"), 3.69),
        # Ratios that the paper's text gives: figures that were copied wrongly would break them.
        ("longspec", "1", ("LC-13B", "LongSpec", "RepoBench-P", "speedup"), 3.26),
        ("longspec", "1", ("V-7B", "MagicDec", "GovReport", "speedup"), 0.91),
    ],
)
def test_figures_are_the_papers(paper, table, key, figure):
    assert get_table(PAPERS[paper], table).published[key] == pytest.approx(figure, abs=0.005)


def test_small_scale_shrinks_lengths_and_budgets():
    scaled = ScaledTable(get_table(PAPERS["specpv"], "table 4"), is_small=True)
    line, column = scaled.table.lines[0], scaled.table.columns[0]
    assert scaled.options(line, column) == {"drafter": "eagle3", "budget": 256, "reduction": "mean", "reread": False}
    assert (
        scaled.prompt_tokens(column) == 2048 and ScaledTable(scaled.table, is_small=False).prompt_tokens(column) is None
    )
    assert any("are an eighth of the paper's" in text for text in scaled.differences())


def test_names_are_forgiving():
    assert get_table(get_paper("LongSpec"), "Figure 5").name == "fig5"
    assert get_table(get_paper("specpv"), "table 2").name == "2"
    with pytest.raises(RequestError, match="Its tables: fig1, 1, 2, 3, fig4"):
        get_table(get_paper("specpv"), "9")
    with pytest.raises(RequestError, match="Papers: longspec"):
        get_paper("medusa")


def test_profiles_that_earlier_versions_wrote_are_read():
    """Without updates and numbers of forwards."""
    earlier = {"rounds": 3, "seconds": {"draft": 0.002, "attention": 0.001, "forward": 0.003, "rest": 0.001}}
    assert mean_part_ms([earlier]) == pytest.approx(
        {"draft_ms": 2.0, "attention_ms": 1.0, "forward_ms": 3.0, "rest_ms": 1.0, "verify_ms": 4.0}
    )
    seconds = earlier["seconds"] | {"update": 0.001}
    now = mean_part_ms([earlier | {"seconds": seconds, "draft_forwards": 4}])
    assert (now["draft_ms"], now["draft_forward_ms"], now["update_ms"]) == pytest.approx((3.0, 0.5, 1.0))
