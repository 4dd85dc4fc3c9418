"""One definition of each figure, wherever it is shown: hand-made records whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from statistics import mean, stdev

import psutil
import pytest

from longdraft import Result
from longdraft.bench import length_reports, report
from longdraft.bench.acceptance import AcceptanceRun, RunKey
from longdraft.bench.papers import PAPERS
from longdraft.bench.quality import quality_figures as figures_of_texts
from longdraft.bench.records import from_json
from longdraft.bench.run import BatchResult
from longdraft.serve.choice import SpecDecodingStats

TOKENS = 129
# A few texts repeat themselves, most do not: the median of ratios says 1.16, the sums 1.68, the mean of ratios 3.55.
FORWARDS = (120, 115, 110, 20, 16)
NEW = TOKENS - 1
POOLED = NEW * len(FORWARDS) / sum(FORWARDS)


def jackknife(pairs):
    def pooled(some):
        return sum(t for t, _ in some) / sum(n for _, n in some)

    without, n = [pooled(pairs[:i] + pairs[i + 1 :]) for i in range(len(pairs))], len(pairs)
    return ((n - 1) / n * sum((x - mean(without)) ** 2 for x in without)) ** 0.5


ERROR = jackknife([(NEW, n) for n in FORWARDS])


def batch(forwards: tuple[int, ...], tokens: int = TOKENS, runs: int = 2, seconds: float = 1.0, **over) -> BatchResult:
    """A batch as a results file has it: ``m`` takes ``forwards`` for its prompts, half the seconds of ``ar``."""

    def run(rounds: tuple[int, ...], seconds: float) -> dict:
        return {
            "tokens": [[0] * tokens] * len(rounds), "first_token_seconds": 0.5, "decode_seconds": seconds,
            "rounds": list(rounds), "accepted": [], "partial_rounds": 0, "partial_tokens": 0,
            "view": "",
        }  # fmt: skip

    plain = tuple(tokens - 1 for _ in forwards)
    line = {
        "dataset": "d", "context": None, "batch": len(forwards), "samples": [f"p{n}" for n in forwards],
        "prompt_tokens": [100] * len(forwards), "cold": {}, "differences": [], "comparable": ["m"],
        "rounds": {"ar": [run(plain, seconds)] * runs, "m": [run(forwards, seconds / 2)] * runs},
    }  # fmt: skip
    return from_json(BatchResult, json.loads(json.dumps(line | over)))


def row_of(measured: list[BatchResult]) -> dict:
    shown = report.make_report(report.document(["ar", "m"], measured))
    assert any("±" in str(cell) for _, table in shown.tables for c in table.columns for cell in c.cells)
    return next(row for row in shown.document["rows"] if row["method"] == "m")


@pytest.mark.parametrize("together", [1, 5], ids=["alone", "in a batch"])
def test_bench_pools_all_prompts_and_runs(together):
    groups = [FORWARDS[i : i + together] for i in range(0, 5, together)]
    row = row_of([batch(own) for own in groups])
    assert row["mean_accepted_length"] == pytest.approx(POOLED) and row["prompts"] == 5
    assert row["standard_error"] == pytest.approx(ERROR)
    # Tokens that the decode seconds did not bring, those of the prefill, are in no rate.
    assert row["tokens_per_second"] == pytest.approx(2 * NEW * together)
    assert row["speedup_vs_ar"] == 2


def test_a_text_that_ended_with_its_first_token_weighs_nothing():
    row = row_of([*(batch((n,)) for n in FORWARDS), batch((0,), tokens=1)])
    assert (row["mean_accepted_length"], row["prompts"]) == (pytest.approx(POOLED), 5)
    (alone,) = report.rows(["m"], [batch((0,), tokens=1)])
    assert alone["mean_accepted_length"] is alone["standard_error"] is alone["tokens_per_second"] is None


@pytest.mark.parametrize("made", [length_reports.acceptance_report, length_reports.break_even_report])
def test_the_same_by_length(made):
    runs = []
    for (i, n), name in product(enumerate(FORWARDS), ("ar", "m")):
        run_settings = RunKey(name, "{}", "", 0.0, 64, None, "d", f"p{i}", f"{i}")
        plain = name == "ar"
        runs.append(AcceptanceRun(run_settings, 60, NEW, NEW if plain else n, (), 1.0 if plain else 0.5))
    rows = made(runs, ("ar", "m"), (), True).document["rows"]
    (row,) = [row for row in rows if row["method"] == "m"]
    assert (row["mean_accepted_length"], row["prompts"]) == (pytest.approx(POOLED), 5)
    assert row["standard_error"] == pytest.approx(ERROR)
    if made is length_reports.break_even_report:
        assert (row["tokens_per_second"], row["speedup_vs_ar"]) == (2 * NEW, 2)


def test_quality_and_records_of_earlier_versions():
    run = {"text": "", "tokens": TOKENS, "partial_rounds": 0, "rouge_l": None, "surprise": 1.0}
    for timed in ({"decode_seconds": 0.5}, {"tokens_per_second": TOKENS / 0.5}):
        found = figures_of_texts([run | timed | {"rounds": n} for n in FORWARDS])
        assert (found["mean_accepted_length"], found["prompts"]) == (pytest.approx(POOLED), 5)
        assert found["standard_error"] == pytest.approx(ERROR) and found["tokens_per_second"] == pytest.approx(2 * NEW)


def test_papers_have_averages_of_their_own():
    """As LongSpec's code, SpecPV's caption and SpecExtend's appendix have them."""
    pairs, each = [(NEW, n) for n in FORWARDS], [NEW / n for n in FORWARDS]
    tables = {(paper.name, table.name): table for paper in PAPERS.values() for table in paper.tables}
    assert tables["longspec", "1"].acceptance_stats(pairs)["accepted"] == pytest.approx(POOLED)
    for own in (tables["specpv", "1"], tables["specextend", "2"]):
        found = own.acceptance_stats(pairs)
        assert found["accepted"] == pytest.approx(mean(each) - 1)
        assert found["standard_error"] == pytest.approx(stdev(each) / len(each) ** 0.5)
    assert {name: table.rate_average for (name, number), table in tables.items() if number == "3"} == {
        "longspec": "pooled", "specpv": "pooled", "specextend": "mean",
    }  # fmt: skip


def test_a_result_a_server_and_bench_say_the_same():
    said = Result("", [0] * TOKENS, 9, "m", True, "length", 0.5, 2.0, 20)
    assert (said.mean_accepted_length, said.tokens_per_second) == (NEW / 20, NEW / 2.0)
    stats = [SpecDecodingStats(num_rounds=n, num_emitted_tokens=NEW) for n in FORWARDS]
    assert sum(stats, SpecDecodingStats()).mean_accepted_length == pytest.approx(POOLED, abs=1e-4)
    first = Result("", [0], 9, "m", True, "length", 0.5, 0.0, 0)
    assert (first.mean_accepted_length, first.tokens_per_second) == (0.0, 0.0)
    (row,) = report.rows(["m"], [batch((20,))])
    assert row["mean_accepted_length"] == said.mean_accepted_length


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system says no other peak")
def test_peak_memory_is_not_that_of_the_process_that_started_this_one():
    held = bytearray(200 << 20)
    asked = (
        "import types; from longdraft.memory import memory_info; "
        "print(memory_info.peak_bytes(types.SimpleNamespace(type='cpu')))"
    )
    peak = int(subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True, text=True).stdout)
    assert 0 < peak < len(held) < psutil.Process().memory_info().rss
