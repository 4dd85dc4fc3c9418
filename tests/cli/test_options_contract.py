"""The contract of options: each method refuses a value out of an option's range by name, before anything loads; the
command line knows the same ones.
"""

from __future__ import annotations

from dataclasses import fields

import pytest

from longdraft import Speculator
from longdraft.cli.method_options import CATALOGUE, DraftOptions, parse_options
from longdraft.options import declared
from longdraft.registry import METHODS
from longdraft.trees.options import TreeOptions
from tests.options_page import catalogue


def out_of_range(option):
    if option.choices:
        return ["some", 8]
    if option.kind is tuple:
        return [(), (3, 0), (2, -1), (2.5,), "many"]
    if option.kind is bool:
        return [3, "yes"]
    if option.kind in (int, float):
        below = [] if option.least is None else [option.least - 1]
        return [*below, True, "many", float("nan"), *([2.5] if option.kind is int else [])]
    return []


@pytest.mark.parametrize("method", METHODS)
def test_a_value_out_of_range_or_an_option_that_there_is_not(method):
    for option in METHODS[method].options.values():
        for value in out_of_range(option):
            with pytest.raises(ValueError, match=f"{option.name} must be"):
                Speculator(method, **{option.name: value})
    with pytest.raises(ValueError, match="no option colour"):
        Speculator(method, colour=3)


def test_words_of_the_command_line_are_values_of_the_options_kind():
    pairs = ["lookup=true", "threshold=0.5", "draft=x=y", "top-k=3", "widths=4,4"]
    given = {"lookup": True, "threshold": 0.5, "draft": "x=y", "top_k": 3, "widths": (4, 4)}
    assert parse_options("longspec", pairs) == given
    assert parse_options(None, ["branches=2", "max-n=3"]) == {"branches": 2, "max_n": 3}


def test_the_file_of_the_command_line_is_that_of_the_catalogue_and_trees_have_a_flag_each():
    assert CATALOGUE.read_text(encoding="utf-8") == catalogue(), "python -m tests.options_page writes it"
    flags = {each.name.removeprefix("tree_") for each in fields(DraftOptions)}
    assert flags == {"draft", *declared(TreeOptions)}
