"""Options that there were, and what to use in their place: refused by name, for one version."""

from __future__ import annotations

from collections.abc import Iterable

from longdraft.cli.options import SettingError

_NEEDLES = "RULER's needles are data: --data niah_single, niah_multikey or vt, or niah_single=FILE in a text of yours"
_FEATURES = "features are no longer kept with answers; cache=FOLDER keeps them when a draft is trained"
_OPTIONS = {
    "bench": {"--snapshots": "--one-prefill reads each prompt once for all methods"},
    "bench quality": {
        "--drift": "ROUGE-L and the target's nats say what partial verification costs",
        "--no-drift": "hidden states are not compared any more: leave it out",
        **dict.fromkeys(
            ("--needle", "--needle-depths", "--needle-context", "--needle-samples", "--needle-kinds"), _NEEDLES
        ),
    },
    "train data": {
        "--method": "the server that answers (--url) chooses it; leave it out",
        **dict.fromkeys(("--features", "--layers"), _FEATURES),
        **dict.fromkeys(
            ("--dtype", "--device", "--threads"), "the server that answers (--url) holds the model; leave it out"
        ),
        "repeats": "answers about passages quote them; leave these texts out",
        "--price": "usage counts the tokens that the server has read and written; leave it out",
    },
}


def refuse(verb: str, words: Iterable[str]) -> None:
    """Raises SettingError where the words of a command line hold an option that the verb has no longer."""
    for word in words:
        name = word.partition("=")[0]
        if advice := _OPTIONS.get(verb, {}).get(name):
            raise SettingError(f"{name} of `longdraft {verb}` is gone: {advice}.")
