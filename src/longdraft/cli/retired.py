"""Options that there were, and what to use in their place: refused by name, for one version."""

from __future__ import annotations

from collections.abc import Iterable

from longdraft.cli.options import SettingError

_OPTIONS = {
    "bench": {"--snapshots": "--one-prefill reads each prompt once for all methods"},
}


def refuse(verb: str, words: Iterable[str]) -> None:
    """Raises SettingError where the words of a command line hold an option that the verb has no longer."""
    for word in words:
        name = word.partition("=")[0]
        if advice := _OPTIONS.get(verb, {}).get(name):
            raise SettingError(f"{name} of `longdraft {verb}` is gone: {advice}.")
