"""Verbs and options that there were, and what to use in their place: refused by name, for one version."""

from __future__ import annotations

from collections.abc import Iterable

from longdraft.cli.options import SettingError

_NEEDLES = "RULER's needles are data: --data niah_single, niah_multikey or vt, or niah_single=FILE in a text of yours"
_FEATURES = "features are no longer kept with answers; cache=FOLDER keeps them when a draft is trained"
_VERBS = {
    "completion": "typer's own are `longdraft --install-completion` and `--show-completion`",
    "bench needle": "`longdraft reproduce specextend 1 --data pg19=FILE` asks drafters for needles in a text of yours; "
    "`longdraft bench --data niah_single=FILE` scores answers",
    "bench report": "the bench's own command with --results and --html makes the page, and measures nothing anew",
}
_OPTIONS = {
    "batch": {"--ray": "give each machine a part of the file, or ask replicas (`longdraft serve --ray`)"},
    "bench": {
        "--out": "--json ends with the object, as the last line of stdout",
        "--snapshots": "--one-prefill reads each prompt once for all methods",
        **dict.fromkeys(("--assistant", "--gguf", "--llama-cpp-model"), "`bench length --url` asks servers of others"),
    },
    "bench acceptance": {"--levels": "--json has depth_accepted in every row"},
    "bench quality": {
        "--drift": "ROUGE-L and the target's nats say what partial verification costs",
        "--answer-tokens": "a model that thinks does so in --max-tokens, and the whole text is scored",
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
        "--part": "give each process a --seed and a file of its own",
        "repeats": "answers about passages quote them; leave these texts out",
        "--price": "usage counts the tokens that the server has read and written; leave it out",
    },
}


def refuse(verb: str, words: Iterable[str]) -> None:
    """Raises SettingError for a verb that is gone, or where its words hold an option that it has no longer."""
    if verb in _VERBS:
        raise SettingError(f"`longdraft {verb}` is gone: {_VERBS[verb]}.")
    for word in words:
        name = word.partition("=")[0]
        if advice := _OPTIONS.get(verb, {}).get(name):
            raise SettingError(f"{name} of `longdraft {verb}` is gone: {advice}.")
