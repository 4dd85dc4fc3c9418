"""A result as a notebook shows it: the text, drafted tokens in colour, and its figures."""

from __future__ import annotations

import html
from collections.abc import Sequence

from longdraft.engine.streaming import Piece

# Legible on white and on black.
_DRAFTED = "color: #2e9e4f"


def page(pieces: Sequence[Piece], summary: str) -> str:
    """HTML of a text and a line about it.

    Args:
        pieces: of the text, each with whether it was drafted. summary: figures.
    """
    shown = "".join(_coloured(html.escape(text)) if drafted else html.escape(text) for text, drafted in pieces)
    legend = f" &middot; {_coloured('drafted and accepted')}" if any(piece.drafted for piece in pieces) else ""
    return (
        f'<div style="white-space: pre-wrap">{shown}</div>'
        f'<div style="font-size: smaller; opacity: 0.7">{html.escape(summary)}{legend}</div>'
    )


def _coloured(text: str) -> str:
    return f'<span style="{_DRAFTED}">{text}</span>'
