"""``longdraft bench needle``: how well drafters foresee a needle, by what they see of the text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.cli import console, measuring, method_options, options

if TYPE_CHECKING:
    from longdraft.bench.needle import View
    from longdraft.drafts.draft import Draft

DEPTHS = "0.1,0.3,0.5,0.7,0.9"
# What fits a context of 8K; one that is shorter takes those that fit it.
CONTEXTS = (1024, 2048, 4096, 8192)


def needle(
    *,
    haystack: Annotated[Path, typer.Option(help="The long text that needles are put in: plain text or JSONL.")],
    views: Annotated[
        str | None,
        typer.Option(
            help="Drafters, with commas between: full, streaming, retrieval (of a small language model), "
            "target-retrieval, or a method with options, such as longspec:retrieval=true.",
            show_default="the drafts', with and without retrieval, and target-retrieval",
        ),
    ] = None,
    draft: Annotated[
        list[Path] | None,
        typer.Option(help="Draft folder, or a small language model; repeatable.", show_default="those that come along"),
    ] = None,
    needle_context: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a haystack, one or several with commas between.",
            show_default=f"{','.join(map(str, CONTEXTS))}, as far as they fit the model",
        ),
    ] = None,
    needle_depths: Annotated[str, typer.Option(help="Where needles lie; 0: beginning, 1: end.")] = DEPTHS,
    needle_samples: Annotated[int, typer.Option(help="Haystacks of each depth.")] = 2,
    wording: options.TemplateOptions,
    loading: options.ModelOptions,
    output: measuring.Rendered,
) -> None:
    """Measure how well drafters foresee a needle in a long text: full, streaming and retrieved caches (SpecExtend)."""
    from longdraft.bench.needle import NeedleDrafts, checked, depth_of, haystacks
    from longdraft.bench.records import fingerprint
    from longdraft.bench.reproduce.scaled import drafts_by_kind
    from longdraft.bench.results import header_of_units
    from longdraft.drafts.kinds import KINDS

    asked = None if needle_context is None else method_options.whole_numbers("--needle-context", needle_context)
    if asked is not None and (not asked or min(asked) < 1):
        raise options.SettingError(f"--needle-context takes numbers of tokens, not {needle_context!r}.")
    if not haystack.is_file():
        raise options.SettingError(f"--haystack {haystack}: there is no such file.")
    depths = method_options.numbers("--needle-depths", needle_depths)
    with options.settings_checked():
        checked(depths, needle_samples)
        drafts = {kind: KINDS[kind].load(folder) for kind, folder in drafts_by_kind(draft or []).items()}
        wanted = default_views(drafts) if views is None else [_view(word) for word in method_options.words(views)]
    if not wanted:
        raise options.SettingError("--views names none.")
    output.check()
    with console.status() as status:
        loaded = loading.load(status)
        status("Reading drafts")
        with options.settings_checked():
            hosted = NeedleDrafts(loaded, wanted, drafts)
        status("Encoding")
        limit = hosted.runner.context_length
        lengths = hosted.contexts(asked or [c for c in CONTEXTS if c <= limit] or [limit])
        found = {
            f"{length:,} tokens, text {i}, needle at {depth_of(each):g}": each
            for length in lengths
            for i, each in enumerate(
                haystacks(haystack, length, loaded.tokenizer, depths, needle_samples, **wording.asked), 1
            )
        }
    content = {"views": hosted.names, "drafts": {kind: fingerprint(own.folder) for kind, own in drafts.items()}}
    header = partial(header_of_units, "longdraft-needle", content, loaded, loading.name)
    output.measure_prompts(hosted, found, header, "haystacks")


def default_views(drafts: dict[str, Draft[Any]]) -> list[View]:
    """Every view of the drafts that are given, of a small language model where none is."""
    from longdraft.bench.needle import RETRIEVED, SMALL, view
    from longdraft.methods import METHODS

    views = []
    for kind in list(drafts) or [SMALL["full"][0]]:
        if kind == SMALL["full"][0]:
            views += [view(name, {}) for name in SMALL]
        else:
            views += [view(kind, {})]
            views += [view(kind, {"retrieval": True})] if "retrieval" in METHODS[kind].options else []
    return [*views, view(RETRIEVED, {})]


def _view(word: str) -> View:
    """``longspec:retrieval=true`` -> a view."""
    from longdraft.bench.needle import NAMED, view
    from longdraft.methods import METHODS

    name, *pairs = word.split(":")
    method, _ = NAMED.get(name, (name, {}))
    return view(name, method_options.method_options(method if method in METHODS else None, pairs))
