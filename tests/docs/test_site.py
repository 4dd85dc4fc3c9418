"""The documentation as a site: built strictly, without a network; its first page shows the README's figures."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import longdraft

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="needs the group docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_shows_what_the_readme_the_code_and_the_pages_have(site):
    page = (site / "index.html").read_text()
    table = (ROOT / "README.md").read_text().partition("## Figures\n")[2].partition("\n|")[2].partition("\n\n")[0]
    wanted = [cell.strip(" *") for row in table.splitlines() for cell in row.split("|") if re.search(r"\d\.\d", cell)]
    shown = {unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", page)}
    assert wanted and {*wanted} <= shown
    (plot,) = re.findall(r'<img[^>]* src="([^"]*)"', page)
    assert (site / plot).is_file()
    reference = (site / "reference" / "index.html").read_text()
    for name in longdraft.__all__:
        assert f'id="longdraft.{name}"' in reference or f'id="longdraft.{name}.{name}"' in reference, name
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name in re.findall(r"\]\(\.\./([^)#\s]+)", pages):  # links beyond the docs lead to copies
        assert (site / "files" / f"{name}.txt").read_bytes() == (ROOT / name).read_bytes()


def test_pages_ask_no_other_host_for_anything_and_language_models_have_them_too(site):
    for page in site.rglob("*.html"):
        assert not re.search(r'<(?:script|img|link)\b[^>]*(?:src|href)="?(?:https?:)?//', page.read_text()), page
    listed = (site / "llms.txt").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"]({page.name}): " in listed and (site / page.name).read_text().startswith("# "), page.name
    assert "longdraft.Speculator(" in (site / "index.md").read_text()  # the README's part
