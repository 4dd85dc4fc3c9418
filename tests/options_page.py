"""``python -m tests.options_page`` writes what is made from the methods: the page with all options, and the catalogue
that the command line reads instead of loading methods.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from functools import partial

from longdraft.cli.method_options import CATALOGUE
from longdraft.method import LookupOptions, Method
from longdraft.options import LazyImport, Option, Options, declared
from longdraft.registry import DEFAULT_METHODS, KINDS, METHODS

PAGE = CATALOGUE.with_name("options.md")
HEAD = (
    "# Options of all methods\n\n"
    "Written by `python -m tests.options_page`; `longdraft methods NAME` has those of one method.\n\n"
)


def groups_of(method: Method) -> list[type[Options]]:
    """The option dataclasses of a method's drafter, verifier and wrapper."""
    factories = [method.drafter, method.verifier]
    imported = [factory.target if isinstance(factory, LazyImport) else factory for factory in factories]
    plain = [factory.func if isinstance(factory, partial) else factory for factory in imported]
    found = [group for factory in plain for group in getattr(factory, "options", ())]
    return found + ([LookupOptions] if method.needs_draft or method.accepts_lookup else [])


def bases_of(group: type[Options]) -> list[type[Options]]:
    """The groups that a group inherits options from, then the group itself."""
    return [each for each in reversed(group.__mro__) if issubclass(each, Options) and each is not Options]


def table() -> str:
    """A table with a bold row for each group of options, followed by its options without inherited ones."""
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
                rows.append(f"| {all_names} | {o.range_in_words} | {o.default_in_words} | {o.help} |")
    return "\n".join([*rows, ""])


def catalogue() -> str:
    """Options, as what differs from an option's defaults; and the indices of each method's options."""
    options: list[dict[str, object]] = []
    methods = {}
    for method in METHODS.values():
        own = [_kept(each) for each in method.options.values()]
        options += [each for i, each in enumerate(own) if each not in options and each not in own[:i]]
        methods[method.name] = [options.index(each) for each in own]
    trained = [(kind.training.command or kind.name, kind.training.summary) for kind in KINDS.values() if kind.training]
    rows = ",\n".join(map(json.dumps, options))
    by_name = ",\n".join(f"{json.dumps(name)}: {json.dumps(own)}" for name, own in methods.items())
    rest = f'"defaults": {json.dumps(DEFAULT_METHODS)},\n"trainings": {json.dumps(dict(trained), indent=0)}'
    return f'{{"options": [\n{rows}\n],\n"methods": {{\n{by_name}\n}},\n{rest}}}\n'


def _kept(each: Option) -> dict[str, object]:
    own, usual = asdict(each), asdict(Option(""))
    found = {name: value for name, value in own.items() if value != usual[name]}
    for name in ("default", "help", "usual"):
        found.pop(name, None)
    return json.loads(json.dumps(found, default=lambda kind: kind.__name__))


if __name__ == "__main__":
    PAGE.write_text(HEAD + table(), encoding="utf-8")
    CATALOGUE.write_text(catalogue(), encoding="utf-8")
