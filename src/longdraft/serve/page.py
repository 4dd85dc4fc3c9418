"""The page at ``/``, sent as a single file. ``vendored/`` has its JavaScript libraries with their licences."""

from __future__ import annotations

import re
from importlib.resources import files


def render_page() -> str:
    """The page's HTML, with its script files inlined."""
    folder = files("longdraft.serve")
    html = folder.joinpath("page.html").read_text(encoding="utf-8")

    def inline(script: re.Match[str]) -> str:
        return "<script>" + folder.joinpath(script[1]).read_text(encoding="utf-8")

    return re.sub(r'<script src="([\w./]+)">', inline, html)
