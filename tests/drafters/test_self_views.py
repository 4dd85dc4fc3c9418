"""The views of self-drafting by their options: sizes that were not given, and what makes no view."""

from __future__ import annotations

import pytest

from longdraft.drafters.self_drafter import self_view


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("streaming", None, None, None, None), (512, 16, 496)),
        (("streaming", 100, None, None, None), (100, 16, 84)),
        (("streaming", None, 4, 30, None), (34, 4, 30)),
        (("streaming", 64, 4, 30, None), (64, 4, 30)),
        (("snapkv", None, None, None, None), (512, 16, 32)),
        (("chunks", 256, None, None, 6), (256, 18, 32)),
        (("tokens", 256, 0, 8, None), (256, 0, 8)),
        (("quest", 256, None, None, None), (256, 16, 32)),
        (("minmax", 256, None, None, 6), (256, 18, 32)),
        (("snapkv", 256, None, None, 6), (256, 18, 32)),
    ],
    ids=str,
)
def test_sizes_that_were_not_given(options, sizes):
    view = self_view(*options)
    assert (view.budget, view.sink, view.window) == sizes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("some", None, None, None, None), "view must be all, streaming, snapkv, chunks, tokens, .* or mean-key"),
        (("snapkv", 40, None, None, None), r"at least sink \+ window \(48 tokens\), got 40"),
        (("streaming", 8, None, None, None), r"at least sink \+ window"),
        (("streaming", 20, 16, 8, None), r"at least sink \+ window \(24 tokens\), got 20"),
        (("tokens", 16, 8, 9, None), r"at least sink \+ window"),
        (("chunks", 50, None, None, None), r"sink \+ window \+ chunk \(56 tokens\)"),
        (("chunks", None, 12, None, 8), "sink must be a multiple of chunk"),
        (("chunks", None, None, None, 0), "chunk must be"),
        (("tokens", None, None, None, 8), "such as view=chunks, and not view=tokens"),
        (("streaming", None, None, None, 8), "and not view=streaming"),
        (("tokens", None, -1, None, None), "sink must be a whole number"),
        (("tokens", None, None, 0, None), "window must be a whole number of at least 1"),
        (("streaming", "512", None, None, None), "budget must be a whole number"),
        (("snapkv", 512.0, None, None, None), "budget must be a whole number"),
        (("snapkv", True, None, None, None), "budget must be a whole number"),
    ],
    ids=str,
)
def test_sizes_that_make_no_view(options, says):
    with pytest.raises(ValueError, match=says):
        self_view(*options)
