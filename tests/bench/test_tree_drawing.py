"""A round's tree as SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

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


def boxes(svg):
    """Of each node, by its text: kind, left edge, top edge, right edge."""
    found = {}
    for group in ElementTree.fromstring(svg).iter("g"):
        rect, text = group.find("rect"), group.find("text")
        x, y, width = (float(rect.get(name)) for name in ("x", "y", "width"))
        found[text.text] = (group.get("class"), x, y, x + width)
    return found


def test_every_node_has_a_place_of_its_own():
    found = boxes(draw(TREE))
    assert [kind for kind, *_ in found.values()] == ["path", "node", "path", "node", "node", "path", "bonus"]
    places = [(x, y) for _, x, y, _ in found.values()]
    assert len(set(places)) == 7
    # A child stands to the right of its parent's box.
    for child, parent in (("·b", "·a"), ("·c", "·a"), ("·d", "·b"), ("·e", "·c"), ("·f", "·c"), ("·g", "·f")):
        assert found[child][1] > found[parent][3]
    # Siblings and cousins of one depth are below each other.
    assert len({found[name][2] for name in ("·d", "·e", "·f")}) == 3


def test_the_accepted_path_is_straight_and_on_top():
    found = boxes(draw(TREE))
    tops = {found[name][2] for name in ("·a", "·c", "·f", "·g")}
    assert len(tops) == 1 and min(tops) == min(y for _, _, y, _ in found.values())


def test_probabilities():
    svg = draw(TREE)
    assert re.findall(r'class="p"[^>]*>([^<]*)<', svg) == ["0.90", "0.50", "0.82", "0.74", "0.14"]
    assert 'class="p"' not in draw(TREE | {"log_probs": None})


def test_everything_lies_inside():
    root = ElementTree.fromstring(draw(TREE))
    _, _, width, height = map(float, root.get("viewBox").split())
    for rect in root.iter("rect"):
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height


def test_a_root_alone():
    assert list(boxes(draw({"tokens": ["x"], "parents": [-1], "path": [0], "bonus": "y"}))) == ["x", "y"]


def test_tokens_are_escaped_and_blanks_are_seen():
    assert shown(" a\n\t\0") == "·a↵→\N{REPLACEMENT CHARACTER}"
    assert len(shown("x" * 100)) == LONGEST
    svg = draw(TREE | {"tokens": ["<&\"'>"] * 6})
    assert ElementTree.fromstring(svg).find("g").find("text").text == "<&\"'>"


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
