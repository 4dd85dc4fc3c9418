"""The table of options in docs/methods.md, made from the catalogue: ``python -m tests.options_page`` writes it."""

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


def bases_of(group: type[Options]) -> list[type[Options]]:
    """A group behind the groups that it inherits options from."""
    return [each for each in reversed(group.__mro__) if issubclass(each, Options) and each is not Options]


def table() -> str:
    """One table: a bold row for each group of options, then its options, without those that a base has."""
    owners: dict[type[Options], list[str]] = {}
    for method in METHODS.values():
        for group in dict.fromkeys(base for own in groups_of(method) for base in bases_of(own)):
            owners.setdefault(group, []).append(f"`{method.name}`")
    rows = ["| option | takes | default | what it is |", "|---|---|---|---|"]
    for group, names in owners.items():
        first_line = inspect.getdoc(group).partition("\n")[0]
        title = first_line.partition(". ")[0].rstrip(".").replace("``", "`")
        rows.append(f"| **{title}** | | | of {', '.join(names)} |")
        inherited = [option for base in bases_of(group)[:-1] for option in declared(base).values()]
        for o in declared(group).values():
            if o not in inherited:
                all_names = ", ".join(f"`{name}`" for name in (o.name, *o.aliases))
                rows.append(f"| {all_names} | {o.range} | {o.default_in_words} | {o.help} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
