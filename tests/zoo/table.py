"""The table of docs/models.md, made by hosting a tiny model of each type: ``python -m tests.zoo.table`` writes it.

Types are given as arguments where only their rows are to be written anew.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("LONGDRAFT_PLAN", "fixed")

import torch
import transformers

from tests.zoo.judging import Verdict, judge
from tests.zoo.tiny_models import MODEL_TYPES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- models -->\n", "<!-- /models -->\n"
# A package that a model needs and that the tests do not install.
MISSING = {"gemma3n": "timm"}


def row(model_type: str, verdict: Verdict) -> str:
    kinds = ", ".join(verdict.kinds)
    return f"| `{model_type}` | {'yes' if verdict.hosted else 'no'} | {kinds} | {verdict.reason} |"


def rows() -> dict[str, str]:
    """Model type -> its row; on the page, types whose rows say the same share one."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    by_type = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            types, _, rest = line[2:].partition(" |")
            by_type |= {name: f"| `{name}` |{rest}" for name in types.strip("`").split("`, `")}
    return by_type


def merge_equal_rows(by_type: dict[str, str]) -> str:
    """The rows with those that say the same in one, hosted ones first."""
    types: dict[str, list[str]] = {}
    for name in sorted(by_type):
        types.setdefault(by_type[name].partition("` |")[2], []).append(f"`{name}`")
    order = sorted(types, key=lambda rest: (rest.split("|")[0].strip() != "yes", rest))
    return "".join(f"| {', '.join(types[rest])} |{rest}\n" for rest in order)


def table_version() -> str:
    """The version of transformers that the page names."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition("transformers ")[2].partition(":")[0]


def write(types: list[str]) -> None:
    by_type = rows() if types else {}
    for model_type in types or MODEL_TYPES:
        if model_type in MISSING:
            verdict = Verdict((), f"not tried: it needs the package {MISSING[model_type]}")
        else:
            verdict = judge(model_type)
        by_type[model_type] = row(model_type, verdict)
        print(by_type[model_type])
    hosted = sum(line.split("|")[2].strip() == "yes" for line in by_type.values())
    summary = f"{hosted} of the {len(by_type)} causal language models of transformers {transformers.__version__}:\n\n"
    head = "| model types | hosted | its layers | why not |\n|---|---|---|---|\n"
    table = summary + head + merge_equal_rows(by_type)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tiny tensors a second thread costs ten times what it saves
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    write(sys.argv[1:])
