"""Chained heads: the next tokens from one hidden state of the target (TokenSwift, Wu et al. 2025, arXiv:2502.18890).

    h_i = h_{i-1} + W_i RMSNorm(h_{i-1})        i = 1 .. heads
    logits_i = target_head(RMSNorm(h_i))        the target's own head, by reference

h_0 is the hidden state of the last verified token, before the target's final norm. It lies in the store, so drafting
costs one product with the target's head and no forward. Head i predicts the i-th token behind the root.

The paper starts from the root's own state instead, which a forward of the target on a part of its KV gives
(:mod:`longdraft.drafters.tokenswift`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.shared.fused_level import draft_kernels
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts import draft_folder, tokenswift_heads
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.model.stored import quantize_for_draft
from longdraft.model.tensor_parallel import parallel_linear
from longdraft.options import Options, option, parse
from longdraft.trees.level import TreeLevel
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.view import View

# Fresh heads say the token before theirs. They should not be as sure of it as the target is of its own.
INITIAL_NORM_SCALE = 0.3


@dataclass(frozen=True)
class HeadsShape:
    """Sizes. The hidden size is the target's.

    Attributes:
        own_norms: each head has a norm of its own before the target's head, as TokenSwift's published ones.
    """

    hidden_size: int
    heads: int
    rms_norm_eps: float = 1e-6
    own_norms: bool = False


class _Head(nn.Module):
    """One step: from the state that says a token to the state that says the next one."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = h + self.proj(self.norm(h))
        return out


class HeadsBlock(nn.Module):
    """The heads, and the norm before the target's head, or one of each head."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        self.heads = nn.ModuleList(_Head(shape) for _ in range(shape.heads))
        size, eps = shape.hidden_size, shape.rms_norm_eps
        if shape.own_norms:
            self.norms = nn.ModuleList(nn.RMSNorm(size, eps) for _ in range(shape.heads))
        else:
            self.norm = nn.RMSNorm(size, eps)

    def initialize(self, final_norm: torch.Tensor, size: float = 1.0) -> None:
        """Zero projections: at first every head repeats what the target itself says, less surely.

        Args:
            final_norm: (hidden,) weight of the target's.
            size: of a number of the target's states, root of the mean square. A step of training then moves states of
                any size as far.
        """
        with torch.no_grad():
            for name, weight in self.heads.named_parameters():
                weight.fill_(size if name.endswith("norm.weight") else 0.0)
            self.norm.weight.copy_(INITIAL_NORM_SCALE * final_norm)

    def forward(self, h: torch.Tensor, heads: int | None = None) -> list[torch.Tensor]:
        """h (rows, hidden) -> for each of the first ``heads`` heads, (rows, hidden): the input of the target's head."""
        found = []
        for i, head in enumerate(self.heads[:heads]):
            h = head(h)
            found.append(self.norms[i](h) if self.shape.own_norms else self.norm(h))
        return found


KIND = "heads"


class BoundHeads(NamedTuple):
    """Heads in their target's dtype and on its device.

    Attributes:
        head: the input of the target's head -> (..., draft vocabulary).
        draft_to_target_ids: (draft vocabulary,) target id of each draft id; None where they are the same.
    """

    block: HeadsBlock
    head: Callable[[torch.Tensor], torch.Tensor]
    draft_to_target_ids: torch.Tensor | None


class HeadsDraft(TrainedDraft[BoundHeads]):
    """Trained heads, as their folder holds them."""

    kind, layer_count_key = KIND, "heads"
    shape_type, module_type = HeadsShape, HeadsBlock

    @classmethod
    def load(cls, folder: Path | str) -> HeadsDraft:
        """Reads a draft folder of ours, or heads that TokenSwift publishes within their model's folder.

        Raises:
            CheckpointError: unreadable, without heads, or tensors missing, unexpected or of a wrong shape.
        """
        contents = tokenswift_heads.read(folder)
        return cls(folder, draft_folder.load(folder, cls.kind) if contents is None else contents)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size}

    def make(self, runner: TargetRunner) -> BoundHeads:
        head, ids = self.head(runner)
        found = draft_kernels(runner, runner.kv_shape.head_dim)
        return BoundHeads(
            self.load_module(runner), parallel_linear(head if found is None else quantize_for_draft(head)), ids
        )


@dataclass(frozen=True)
class HeadOptions(Options):
    """Trained heads."""

    heads: int | None = option(min=1, help="use so many of the draft's heads", usual="all")


class HeadsDrafter(TreeDrafter):
    """Drafts trees with chained heads.

    Args:
        draft: trained heads.
        options: of :class:`HeadOptions` and :class:`TreeOptions`. Levels cost nothing. The paper's tree is static; a
            planner is given its best nodes instead.
        _level: the target on a part of its KV, whose forward gives the roots' own hidden states and the first level of
            the trees (TokenSwift); None: the heads go on from the states of the last verified tokens.
    """

    options = (HeadOptions, TreeOptions)

    def __init__(self, draft: HeadsDraft, _level: SelfDrafter | None = None, **options: Any) -> None:
        own, tree = parse("heads", options, *self.options)
        count = draft.shape.heads
        if own.heads is not None and own.heads > count:
            raise ValueError(f"heads must be a whole number from 1 to {count}, which the draft has, got {own.heads}")
        self.heads = own.heads or count
        self.draft, self.level = draft, _level
        ahead = _level is not None
        levels, kind = self.heads + ahead, tree.kind("static")
        if kind.depth > levels and (tree.widths is not None or tree.depth is not None):
            raise ValueError(f"a tree of {kind.depth} levels needs as many heads; there are {levels} to draft with")
        if ahead and kind.name == "static" and not kind.is_user_defined:  # first the one token that the target predicts
            kind = replace(kind, branching=(1, *kind.branching))
        self.tree = kind.limit_depth(levels)
        self._rounds = 0

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Products with the target's head, or forwards of the level if there are more."""
        return max(self._rounds, 0 if self.level is None else self.level.forwards)

    @property
    def views(self) -> tuple[View, ...]:
        return () if self.level is None else self.level.views

    @property
    def num_prompt_queries(self) -> int:  # type: ignore[override]
        return 1 if self.level is None else self.level.num_prompt_queries

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The last layer, unless a level gives the states."""
        return (runner.num_layers - 1,) if self.level is None else ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        return () if self.level is None else self.level.query_layers(runner)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self._bound, self._store = self.draft.bind(runner), store
        if self.level is not None:
            self.level.bind(runner, store, (runner.num_layers - 1,))

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        bound, (hidden, first) = self._bound, self._states(sequences)
        self._rounds += 1
        # One product with the head: (B, levels, draft vocabulary).
        said = bound.head(torch.stack(bound.block(hidden, self.heads), dim=1))
        if first is not None:
            first = first if bound.draft_to_target_ids is None else first[:, bound.draft_to_target_ids]
            said = torch.cat([first[:, None].to(said.dtype), said], dim=1)

        def expand(level: TreeLevel) -> torch.Tensor:
            # What a head says does not depend on the path before it.
            # By the host's numbers: an index tensor would have to travel to the device.
            own = torch.stack([said[row, level.depth, None] for row in level.sequence_indices])
            return own.expand(-1, level.tokens.shape[1], -1)

        # All levels are there already: one more costs nothing.
        limit = None if limit is None else replace(limit, min_expected_gain=0.0)
        return self.grow(sequences, expand, bound.draft_to_target_ids, said.device, limit)

    def _states(self, sequences: SequenceOf[Sequence]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States (B, hidden) of the target's last layer, before its final norm: of the roots, with what the target says
        by them (B, vocabulary); or of the tokens before the roots, whose own nobody has computed yet."""
        store, logits = self._store, None
        rows = [s.length - 2 for s in sequences]
        if self.level is not None:
            self.level.update_views(sequences)
            judged = self.level.verify(sequences, [TokenTree((s.output[-1],), (-1,)) for s in sequences])
            logits, store = torch.stack([of_root[0] for of_root in judged]), self.level.cache.store
            rows = [store.lengths[s.slot] for s in sequences]  # behind the view; nothing keeps it
        assert store.features is not None
        return torch.stack([store.features[s.slot, row] for s, row in zip(sequences, rows, strict=True)]), logits

    def observe(self, round_result: RoundResult) -> None:
        if self.level is not None:
            self.level.observe(round_result)

    def release(self, sequence: Sequence) -> None:
        if self.level is not None:
            self.level.release(sequence)


register(
    Kind(
        "heads",
        HeadsDrafter,
        "a few trained heads say the next tokens from one hidden state of the model, at next to no cost",
        "Wu et al. 2025, TokenSwift, arXiv:2502.18890; Cai et al. 2024, Medusa, arXiv:2401.10774",
        load=HeadsDraft.load,
        training=Training(
            "longdraft.training.config:HeadsConfig",
            "longdraft.training.heads:train_heads",
            "Train chained heads (TokenSwift)",
        ),
        in_checkpoint=tokenswift_heads.has_heads,
    )
)
