"""The registry: a table of all methods and kinds of trained drafts.

The table names drafters by "module:name", and a module is imported when its method is first used.
:mod:`longdraft.recipes` chooses a method for a target.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from longdraft.drafts import draft_folder, hub, shipped
from longdraft.drafts.kinds import Kind, Training
from longdraft.engine.drafter import Drafter
from longdraft.engine.verifier import Verifier
from longdraft.errors import CheckpointError, values_checked
from longdraft.files import reports_file_errors
from longdraft.method import Method
from longdraft.options import LazyImport, find_method, options_of

# The drafters that the option ``drafter`` stands for by default. The first one with available weights is used.
DEFAULT_DRAFTERS = (
    "eagle3", "longspec", "eagle", "small-lm", "prompt-lookup", "self", "triforce", "ar",
)  # fmt: skip
# Without a method, the first of these that accepts the user's options and is worthwhile on the target is used.
DEFAULT_METHODS = ("self", "longspec", "prompt-lookup")


def _drafter_choices() -> dict[str, Method]:
    """Returns the methods that the option ``drafter`` accepts: default drafters, and one for each kind of draft."""
    # The main method of a kind of draft has the name of the kind.
    trained_names = (m.name for m in METHODS.values() if m.needs_draft and m.name == m.draft_kind)
    return {name: METHODS[name] for name in dict.fromkeys([*DEFAULT_DRAFTERS, *trained_names]) if name in METHODS}


def _method_of(kind: Kind) -> Method:
    """Returns the method whose drafter takes a draft of this kind."""
    return Method(kind.name, kind.drafter, kind.summary, kind.paper, draft_kind=kind.name)


_PEAGLE, _DFLASH, _DSPARK = "P-EAGLE, arXiv:2602.01469", "DFlash, arXiv:2602.06036", "DSpark, arXiv:2607.05147"
_TRIFORCE = "Sun et al. 2024, TriForce, arXiv:2404.11912"
_MAGICDEC = "Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049"
_SPECEXTEND = "Cha et al. 2025, SpecExtend, arXiv:2505.20776"
_TOKENSWIFT = "Wu et al. 2025, TokenSwift, arXiv:2502.18890"


def _drafter(path: str, **defaults: Any) -> LazyImport:
    return LazyImport(f"longdraft.drafters.{path}", **defaults)


def _training(config: str, run: str, summary: str, command: str = "") -> Training:
    return Training(f"longdraft.training.config:{config}", f"longdraft.training.{run}", summary, command)


# Lists show this order: exact methods without a draft, exact methods with a draft, approximate methods.
_BUILT_IN: tuple[Method | Kind, ...] = (
    Method("ar", _drafter("autoregressive:NoDrafter"), "plain decoding, one token a forward"),
    Method(
        "magicdec",
        _drafter("self_drafter:SelfDrafter", view="snapkv"),
        "the model itself drafts a chain, on a part of its KV cache; for large batches",
        _MAGICDEC,
    ),
    Method(
        "prompt-lookup",
        _drafter("suffix:SuffixDrafter"),
        "drafts what followed the same tokens before, in prompt or output",
        "Saxena 2023, prompt lookup decoding; Yang et al. 2023, arXiv:2304.04487",
    ),
    Method(
        "quantspec",
        _drafter("self_drafter:SelfDrafter", view="all"),
        "the model itself drafts on all of its KV cache in eight bits, and verifies on it as it is",
        "after Tiwari et al. 2025, QuantSpec, arXiv:2502.10424",
        accepts_lookup=True,
    ),
    Method(
        "self",
        _drafter("self_drafter:SelfDrafter"),
        "the model itself drafts on a part of its KV cache, and verifies on all of it",
        f"{_TRIFORCE}; {_MAGICDEC}",
        accepts_lookup=True,
        is_worthwhile=_drafter("self_drafter:can_draft_quantized"),
    ),
    Method(
        "suffix",
        _drafter("suffix:SuffixDrafter"),
        "prompt-lookup by the name of its paper; earlier=N also looks up N tokens of earlier requests",
        "Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975",
    ),
    Kind(
        "dflash",
        _drafter("eagle3:Eagle3Drafter"),
        "DFlash, DFlash 2 and DSpark: a block of tokens from one forward; published drafts load as they are",
        f"{_DFLASH}; {_DSPARK}",
        load=_drafter("dflash:DFlashDraft.load"),
        training=_training("DFlashConfig", "dflash:train_dflash", "Train a DFlash draft"),
    ),
    Kind(
        "eagle",
        _drafter("eagle3:Eagle3Drafter"),
        "published drafts of EAGLE-1 and EAGLE-2: one layer that predicts the model's last hidden states",
        "Li et al. 2024, EAGLE, arXiv:2401.15077; EAGLE-2, arXiv:2406.16858",
        load=_drafter("eagle:EagleDraft.load"),
        training=_training("EagleConfig", "eagle:train_eagle", "Train an EAGLE-1 draft"),
    ),
    Kind(
        "eagle3",
        _drafter("eagle3:Eagle3Drafter"),
        "a trained one-layer draft that reads the model's hidden states; published drafts load as they are",
        "Li et al. 2025, EAGLE-3, arXiv:2503.01840",
        load=_drafter("eagle3:Eagle3Draft.load"),
        training=_training("Eagle3Config", "eagle3:train_eagle3", "Train an EAGLE-3 draft"),
    ),
    Kind(
        "longspec",
        _drafter("longspec:LongSpecDrafter"),
        "a trained one-block draft that reads the model's own KV cache, at the same cost for any context",
        "Yang et al. 2025, LongSpec, arXiv:2502.17421",
        load=_drafter("longspec:LongSpecDraft.load"),
        training=_training("LongSpecConfig", "longspec:train_longspec", "Train a LongSpec draft"),
    ),
    Kind(
        "mtp",
        _drafter("mtp:mtp"),
        "the layer in the model's checkpoint that predicts further tokens (Qwen3.5, GLM-4.5), or Gemma 4's assistant",
        "DeepSeek-AI 2024, DeepSeek-V3, arXiv:2412.19437",
        load=_drafter("mtp:MtpDraft.load"),
        training=_training("MtpConfig", "mtp:train_mtp", "Train an MTP layer"),
        in_checkpoint=LazyImport("longdraft.drafts.mtp_formats:has_mtp_layer"),
    ),
    Kind(
        "peagle",
        _drafter("eagle3:Eagle3Drafter"),
        "published drafts of P-EAGLE: EAGLE-3's layer, all levels of a tree in one forward",
        _PEAGLE,
        load=_drafter("peagle:PEagleDraft.load"),
    ),
    Kind(
        "small-lm",
        _drafter("small_lm:SmallLMDrafter"),
        "a small language model, best of the model's family, on all of the context or on a part of it",
        "Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
        load=LazyImport("longdraft.drafts.language_model:SmallLMDraft.load"),
        training=_training("LmConfig", "lm:train_lm", "Train a small language model to draft", "lm"),
    ),
    Method(
        "specextend",
        _drafter("small_lm:SmallLMDrafter", view="retrieval"),  # with an OPT-Tree
        "a small language model on the chunks of a long context that the model attends to",
        _SPECEXTEND,
        draft_kind="small-lm",
    ),
    Method(
        "specextend-eagle3",
        _drafter("eagle3:Eagle3Drafter", retrieval=True),  # with an OPT-Tree
        "EAGLE-3 on the chunks of a long context that the model attends to, at positions it was trained for",
        _SPECEXTEND,
        draft_kind="eagle3",
    ),
    Kind(
        "tokenswift",
        _drafter("tokenswift:tokenswift"),
        "heads after a forward of the model on a part of its KV cache, and phrases of the output",
        _TOKENSWIFT,
        load=_drafter("heads:HeadsDraft.load"),
        training=_training("HeadsConfig", "heads:train_heads", "Train TokenSwift's heads"),
        in_checkpoint=LazyImport("longdraft.drafts.tokenswift_heads:has_heads"),
    ),
    Method(
        "triforce",
        _drafter("triforce:triforce"),
        "a small language model drafts for the model on a part of its KV cache, which drafts for it on all of it",
        _TRIFORCE,
        draft_kind="small-lm",
    ),
    Method(
        "specpv",
        None,
        "verifies on the part of a long context that matters, and on all of it every few rounds; any drafter",
        "Tan et al. 2025, SpecPV, arXiv:2512.02337",
        verifier=LazyImport("longdraft.engine.specpv:make_specpv"),
        drafter_choices=_drafter_choices,
    ),
)
_BUILT_IN_NAMES = frozenset(entry.name for entry in _BUILT_IN)
KINDS: dict[str, Kind] = {entry.name: entry for entry in _BUILT_IN if isinstance(entry, Kind)}
METHODS: dict[str, Method] = {
    entry.name: _method_of(entry) if isinstance(entry, Kind) else entry for entry in _BUILT_IN
}


def get_method(name: str) -> Method:
    """Returns the method of that name.

    Raises:
        UnknownMethodError: there is none; the message lists the names.
    """
    return find_method(METHODS, name)


@reports_file_errors("The draft in", "Copy it again.")
def kind_of(folder: Path | str) -> Kind:
    """Returns the kind of the draft in a folder or hub repository.
    Raises CheckpointError if there is no draft, or a draft of an unknown kind."""
    folder = hub.local_folder(folder)
    name = draft_folder.detect_kind(folder)
    if name in KINDS:
        return KINDS[name]
    if not name:
        raise CheckpointError(f"{folder} holds no draft that longdraft knows: see docs/drafts.md for the formats.")
    raise CheckpointError(
        f"{folder} holds a draft for {name!r}, which this version of longdraft does not read: get or train one of "
        "a format of docs/drafts.md, such as EAGLE-3. If a file of yours registers this kind, add --load FILE."
    )


def methods() -> list[dict[str, Any]]:
    """Lists all methods, as ``longdraft methods --json`` prints them.

    A method is ``available`` if the user needs no draft folder: it uses no draft, or a draft comes with longdraft.
    """
    shipped_kinds = {draft_folder.detect_kind(folder) for folder in shipped.folders()}
    return [
        {
            "name": method.name,
            "exact": method.exact,
            "needs_draft": method.needs_draft,
            "paper": method.paper,
            "available": not method.needs_draft or method.draft_kind in shipped_kinds,
        }
        for method in METHODS.values()
    ]


@values_checked(caught_types=(ValueError, TypeError))
def compose(
    name: str,
    drafter: Callable[..., Drafter],
    schedule: Callable[..., Verifier] = Verifier,
    draft: str | None = None,
    summary: str = "a composition of one's own",
    paper: str = "",
) -> Method:
    """Makes a method from a drafter and a verifier, and registers it in place of an earlier method of the same name.

    Speculator, benchmarks and the command line then accept the method's name, and a planner sizes its trees. The output
    is exact if the verifier is exact.

    Args:
        name: the method's name.
        drafter: builds a new drafter for a run. Its keyword parameters are the method's options.
        schedule: builds the verifier; default: a verifier that reads the full KV cache. The keyword parameters of
            ``schedule`` are options of the method too.
        draft: the registered kind of trained draft that the drafter takes as ``draft``, such as "longspec". The draft
            is loaded from the folder that the user names, else from the shipped folder that fits the target.
        summary: what the method does, for the list of methods.
        paper: the method's paper, for the list of methods.

    Raises:
        RequestError: the name is taken or not allowed, the kind of draft is unknown, or the drafter's parameters do not
            match ``draft``.
    """
    _check_name(name)
    if draft is not None and draft not in KINDS:  # listed in the order of METHODS
        raise ValueError(f"draft must be one of {', '.join(kind for kind in METHODS if kind in KINDS)}, got {draft!r}")
    drafter_options, verifier_options = options_of(drafter), options_of(schedule)
    if ("draft" in drafter_options) != (draft is not None):
        problem = f"takes no `draft`, but {draft} was named" if draft else "takes a `draft`: name its kind with draft="
        raise ValueError(f"the drafter of {name} {problem}")
    if duplicates := {*drafter_options} & {*verifier_options}:
        raise ValueError(f"drafter and schedule of {name} both have an option {', '.join(sorted(duplicates))}")
    METHODS[name] = Method(name, drafter, summary, paper, draft_kind=draft, verifier=schedule)
    return METHODS[name]


@values_checked(caught_types=(ValueError, TypeError))
def register(kind: Kind) -> Method:
    """Registers a kind of trained draft, which is also a method. It replaces an earlier kind of the same name.

    A draft folder of this kind is then accepted wherever a draft is. ``longdraft train`` gets a command for the kind if
    the kind defines ``training``.

    Raises:
        RequestError: the name is taken or not allowed, or the drafter has no parameter ``draft``.
    """
    if not isinstance(kind, Kind):
        raise TypeError(f"register takes a Kind, got {kind!r}")
    _check_name(kind.name)
    if "draft" not in options_of(kind.drafter):
        raise ValueError(f"the drafter of {kind.name} takes no `draft`")
    KINDS[kind.name] = kind
    METHODS[kind.name] = _method_of(kind)
    return METHODS[kind.name]


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a method's name is a string, got {name!r}")
    if name in _BUILT_IN_NAMES:
        raise ValueError(f"{name} is a method of longdraft: give yours another name")
    if not name or any(c in name for c in ":, /="):
        raise ValueError(f"a method's name has no colon, comma, blank, slash or equals sign, got {name!r}")
