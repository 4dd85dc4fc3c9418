"""A round's tree as text."""

from __future__ import annotations

import pytest

from longdraft.bench.tree_drawing import LONGEST, draw, shown

TREE = {
    "tokens": [" a", " b", " c", " d", " e", " f"],
    "parents": [-1, 0, 0, 1, 2, 2],
    "log_probs": [0.0, -0.1, -0.7, -0.2, -0.3, -2.0],
    "path": [0, 2, 5],
    "bonus": " g",
    "mode": "full",
}


def test_every_token_stands_under_its_parent():
    lines = draw(TREE).splitlines()
    assert [line.strip("│├└─ ") for line in lines] == [
        "·a ✓", "·b 0.90", "·d 0.82", "·c 0.50 ✓", "·e 0.74", "·f 0.14 ✓", "·g +",
    ]  # fmt: skip
    depths = [len(line) - len(line.lstrip("│├└─ ")) for line in lines]
    assert depths == [0, 4, 8, 4, 8, 8, 12]


def test_without_probabilities_and_with_a_root_alone():
    assert "0.90" not in draw(TREE | {"log_probs": None})
    alone = draw({"tokens": ["x"], "parents": [-1], "path": [0], "bonus": "y"})
    assert alone.splitlines() == ["x ✓", "└── y +"]


def test_blanks_are_visible():
    assert shown(" a\n\t\0") == "·a↵→\N{REPLACEMENT CHARACTER}"
    assert len(shown("x" * 100)) == LONGEST


@pytest.mark.parametrize(
    "over",
    [
        {"parents": [0] * 6},
        {"parents": [-1]},
        {"path": []},
        {"path": [0, 9]},
        {"log_probs": [0.0]},
        {"parents": [-1] * 6},
    ],
)
def test_what_is_no_tree_is_refused(over):
    with pytest.raises(ValueError, match="drawn tree"):
        draw(TREE | over)
