"""Hooks of the site: pages may link to files outside of docs/, as on GitHub, and docstrings to each other.

For language models the site also has each page as Markdown, and `llms.txt`, which lists them.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

# A page's file -> its title and Markdown.
TEXTS: dict[str, tuple[str, str]] = {}


class Text(File):
    """A file that is copied unchanged, even if it is Markdown."""

    def is_documentation_page(self) -> bool:
        return False


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the files that pages link to by `../`, each as `files/NAME.txt`."""
    pages = [page.content_string for page in files.documentation_pages()]
    for name in sorted({name for page in pages for name in re.findall(r"\]\((\.\./[^)#\s]+)", page)}):
        if (Path(config.docs_dir) / name).is_file():  # otherwise strict mode reports a broken link
            to, kept = f"files/{name.removeprefix('../')}.txt", InclusionLevel.INCLUDED
            files.append(Text(name, config.docs_dir, config.site_dir, False, dest_uri=to, inclusion=kept))


def on_page_markdown(markdown: str, page: Page, **_: object) -> None:
    """Keeps a page's Markdown for `on_post_build`, with the included parts of the README."""
    text = re.sub(r'--8<-- "README.md:(\w+)"', lambda part: _of_readme(part[1]), markdown)
    TEXTS[page.file.src_uri] = (str(page.title), text)


def _of_readme(name: str) -> str:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    return readme.partition(f"[start:{name}] -->\n")[2].partition(f"<!-- --8<-- [end:{name}]")[0].strip()


def on_post_build(config: MkDocsConfig) -> None:
    """Writes each page's Markdown next to it, and `llms.txt`, a list of all pages."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages"]
    for name, (title, text) in TEXTS.items():
        (site / name).write_text(text, encoding="utf-8")
        paragraphs = [p for p in text.split("\n\n") if p and p[0] not in "#<|!-`"]
        lines.append(f"- [{title}]({name}): {' '.join(paragraphs[0].split()) if paragraphs else title}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def on_page_content(html: str, **_: object) -> str:
    """Links names that docstrings mark with roles (:class:`Name`), if the site has them."""
    return re.sub(
        r":(?:attr|class|func|meth):<code>~?((?:[\w.]+\.)?(\w+))</code>",
        r'<autoref identifier="\1" optional><code>\2</code></autoref>',
        html,
    )
