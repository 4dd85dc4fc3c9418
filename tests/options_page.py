"""The tables of options in docs/methods.md, made from the catalogue: ``python -m tests.options_page`` writes them."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

from longdraft.engine.method import LookupOptions, Method
from longdraft.methods import METHODS
from longdraft.options import Options, declared

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"


def groups_of(method: Method) -> list[type[Options]]:
    """The option dataclasses of a method's own drafter, schedule and wrapper."""
    inner = [factory for each in method.drafters for factory in (each.drafter,)]
    factories = [method.drafter, method.schedule, method.wraps, *inner]
    plain = [factory.func if isinstance(factory, partial) else factory for factory in factories]
    found = [group for factory in plain for group in getattr(factory, "options", ())]
    return found + ([LookupOptions] if method.needs_draft or method.joined else [])


def tables() -> str:
    owners: dict[type[Options], list[str]] = {}
    for method in METHODS.values():
        for group in dict.fromkeys(groups_of(method)):
            owners.setdefault(group, []).append(f"`{method.name}`")
    parts = []
    for group, names in owners.items():
        first_line = inspect.getdoc(group).partition("\n")[0]
        title = first_line.partition(". ")[0].rstrip(".").replace("``", "`")
        rows = []
        for o in declared(group).values():
            all_names = ", ".join(f"`{name}`" for name in (o.name, *o.aliases))
            rows.append(f"| {all_names} | {o.range} | {o.default_in_words} | {o.help} |")
        head = "| option | takes | default | what it is |\n|---|---|---|---|"
        parts.append("\n".join([f"**{title}** ({', '.join(names)})\n", head, *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.partition(END)[2], encoding="utf-8")
