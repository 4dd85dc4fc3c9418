"""The web page at ``/``, sent as a single file. Its JavaScript libraries and their licences are in ``vendored/``."""

from __future__ import annotations

import re
from importlib.resources import files


def render_page() -> str:
    """Returns the page's HTML, with the script files inlined."""
    package = files("longdraft.serve")
    html = package.joinpath("page.html").read_text(encoding="utf-8")

    def inline(script: re.Match[str]) -> str:
        return "<script>" + package.joinpath(script[1]).read_text(encoding="utf-8")

    return re.sub(r'<script src="([\w./]+)">', inline, html)
