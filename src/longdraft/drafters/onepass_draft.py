"""A one-pass draft: read from its folder, checked against a target, and bound to it."""

from __future__ import annotations

from functools import cached_property

from longdraft.drafters.eagle3_draft import Eagle3Draft
from longdraft.drafters.onepass_block import OnePassBlock, OnePassShape
from longdraft.drafts.draft_folder import shape_of

KIND = "onepass"


class OnePassDraft(Eagle3Draft):
    """A trained draft."""

    kind, label = KIND, "one-pass"

    @cached_property
    def shape(self) -> OnePassShape:
        return shape_of(OnePassShape, self.config, self.folder, self.label)

    def module(self) -> OnePassBlock:
        return OnePassBlock(self.shape)
