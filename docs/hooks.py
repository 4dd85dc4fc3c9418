"""Hooks of the site: pages may link to files beyond docs/, as on GitHub, and docstrings to one another."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel


class Text(File):
    """A file that is copied as it is, Markdown too."""

    def is_documentation_page(self) -> bool:
        return False


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the files that pages link to by `../`, each as `files/NAME.txt`."""
    pages = [page.content_string for page in files.documentation_pages()]
    for name in sorted({name for page in pages for name in re.findall(r"\]\((\.\./[^)#\s]+)", page)}):
        if (Path(config.docs_dir) / name).is_file():  # else strict mode says that the link leads nowhere
            to, kept = f"files/{name.removeprefix('../')}.txt", InclusionLevel.INCLUDED
            files.append(Text(name, config.docs_dir, config.site_dir, False, dest_uri=to, inclusion=kept))


def on_page_content(html: str, **_: object) -> str:
    """Links names that docstrings mark by roles (:class:`Name`), where the site has them."""
    return re.sub(
        r":(?:attr|class|func|meth):<code>~?((?:[\w.]+\.)?(\w+))</code>",
        r'<autoref identifier="\1" optional><code>\2</code></autoref>',
        html,
    )
