"""The HTML of a result in a notebook: its text, drafted tokens in colour, and its figures."""

from __future__ import annotations

import html
from collections.abc import Sequence

from longdraft.engine.streaming import Piece

_DRAFTED = "color: #2e9e4f"  # legible on white and on black


def page(pieces: Sequence[Piece], summary: str) -> str:
    """Returns the HTML of a text with a line of figures below it."""
    text = "".join(_coloured(html.escape(text)) if drafted else html.escape(text) for text, drafted in pieces)
    legend = f" &middot; {_coloured('drafted and accepted')}" if any(piece.drafted for piece in pieces) else ""
    return (
        f'<div style="white-space: pre-wrap">{text}</div>'
        f'<div style="font-size: smaller; opacity: 0.7">{html.escape(summary)}{legend}</div>'
    )


def _coloured(text: str) -> str:
    return f'<span style="{_DRAFTED}">{text}</span>'
