"""The page at ``/``: one answer with all that it uses inside. ``vendored/`` has libraries of others, with licences."""

from __future__ import annotations

import re
from importlib.resources import files


def render_page() -> str:
    """The page as HTML; scripts that it names by their files stand in it."""
    folder = files("longdraft.serve")
    text = folder.joinpath("page.html").read_text(encoding="utf-8")

    def inside(script: re.Match[str]) -> str:
        return "<script>" + folder.joinpath(script[1]).read_text(encoding="utf-8")

    return re.sub(r'<script src="([\w./]+)">', inside, text)
