"""Chained heads: predict the next tokens from one hidden state of the target (TokenSwift, Wu et al. 2025, 2502.18890).

    h_i = h_{i-1} + W_i RMSNorm(h_{i-1})        i = 1 .. heads
    logits_i = target_head(RMSNorm(h_i))        the target's head, by reference

h_0 is the hidden state of the token before the root, before the target's final norm. It is in the store, so drafting
costs one multiplication by the target's head and no forward. Head i predicts the i-th token after the root.

The paper starts from the root's hidden state instead, which it computes by a forward of the target on a part of its KV
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

# Scale of the norm of new heads. They repeat the prediction of the head before, and must be less sure than the target.
INITIAL_NORM_SCALE = 0.3


@dataclass(frozen=True)
class HeadsShape:
    """Sizes. The hidden size is the target's.
    ``own_norms``: each head has its own norm before the target's head, as in TokenSwift's published heads."""

    hidden_size: int
    heads: int
    rms_norm_eps: float = 1e-6
    own_norms: bool = False


class _Head(nn.Module):
    """One step: from the hidden state that predicts a token to the one that predicts the next token."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = h + self.proj(self.norm(h))
        return out


class HeadsBlock(nn.Module):
    """The heads, and one norm before the target's head, or one for each head."""

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
        """Zero projections: at first every head repeats the target's prediction, less surely.

        Args:
            final_norm: (hidden,) weight of the target's final norm.
            size: root mean square of the target's hidden states, so that a training step moves them by the same
                fraction, whatever their size.
        """
        with torch.no_grad():
            for name, weight in self.heads.named_parameters():
                weight.fill_(size if name.endswith("norm.weight") else 0.0)
            self.norm.weight.copy_(INITIAL_NORM_SCALE * final_norm)

    def forward(self, h: torch.Tensor, heads: int | None = None) -> list[torch.Tensor]:
        """h (T, hidden) -> for each of the first ``heads`` heads, the input (T, hidden) of the target's head."""
        outputs = []
        for i, head in enumerate(self.heads[:heads]):
            h = head(h)
            outputs.append(self.norms[i](h) if self.shape.own_norms else self.norm(h))
        return outputs


KIND = "heads"


class BoundHeads(NamedTuple):
    """Heads in their target's dtype and on its device. ``head``: (..., hidden) -> (..., draft vocabulary).
    ``draft_to_target_ids``: (draft vocabulary,) target id of each draft id; None: they are the same."""

    block: HeadsBlock
    head: Callable[[torch.Tensor], torch.Tensor]
    draft_to_target_ids: torch.Tensor | None


class HeadsDraft(TrainedDraft[BoundHeads]):
    """Trained heads in a folder."""

    kind, layer_count_key = KIND, "heads"
    shape_type, module_type = HeadsShape, HeadsBlock

    @classmethod
    def load(cls, folder: Path | str) -> HeadsDraft:
        """Reads a draft folder in our layout, or heads that TokenSwift publishes in the folder of their model.

        Raises:
            CheckpointError: unreadable, without heads, or tensors missing, unexpected or of a wrong shape.
        """
        contents = tokenswift_heads.read(folder)
        return cls(folder, draft_folder.load(folder, cls.kind) if contents is None else contents)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size}

    def make(self, runner: TargetRunner) -> BoundHeads:
        head, ids = self.head(runner)
        if draft_kernels(runner, runner.kv_shape.head_dim) is not None:
            head = quantize_for_draft(head)
        return BoundHeads(self.load_module(runner), parallel_linear(head), ids)


@dataclass(frozen=True)
class HeadOptions(Options):
    """Use of trained heads."""

    heads: int | None = option(min=1, help="number of the draft's heads to use", usual="all")


class HeadsDrafter(TreeDrafter):
    """Drafts trees with chained heads.

    Args:
        draft: trained heads.
        options: of :class:`HeadOptions` and :class:`TreeOptions`. The tree is static, as in the paper, unless a planner
            sizes it.
        _self_drafter: the target on a part of its KV (TokenSwift). Its forward computes the roots' hidden states, and
            the first level of the trees. None: the heads start from the tokens before the roots.
    """

    options = (HeadOptions, TreeOptions)

    def __init__(self, draft: HeadsDraft, _self_drafter: SelfDrafter | None = None, **options: Any) -> None:
        config, tree_options = parse("heads", options, *self.options)
        num_heads = draft.shape.heads
        self.heads = config.heads or num_heads
        if self.heads > num_heads:
            raise ValueError(
                f"heads must be a whole number from 1 to {num_heads}, which the draft has, got {self.heads}"
            )
        self.draft, self.self_drafter = draft, _self_drafter
        max_depth, tree = self.heads + (_self_drafter is not None), tree_options.config("static")
        if tree.depth > max_depth and (tree_options.widths is not None or tree_options.depth is not None):
            raise ValueError(f"a tree of {tree.depth} levels needs as many heads; there are {max_depth} to draft with")
        if _self_drafter is not None and tree.name == "static" and not tree.is_user_defined:
            tree = replace(tree, branching=(1, *tree.branching))  # the first level is the self-drafter's top-1 token
        self.tree = tree.limit_depth(max_depth)
        self._rounds = 0

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Multiplications by the target's head, or forwards of the self-drafter if there are more."""
        return max(self._rounds, 0 if self.self_drafter is None else self.self_drafter.forwards)

    @property
    def views(self) -> tuple[View, ...]:
        return () if self.self_drafter is None else self.self_drafter.views

    @property
    def num_prompt_queries(self) -> int:  # type: ignore[override]
        return 1 if self.self_drafter is None else self.self_drafter.num_prompt_queries

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The last layer, unless the self-drafter computes the hidden states."""
        return (runner.num_layers - 1,) if self.self_drafter is None else ()

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        return () if self.self_drafter is None else self.self_drafter.query_layers(runner)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self._bound, self._store = self.draft.bind(runner), store
        if self.self_drafter is not None:
            self.self_drafter.bind(runner, store, (runner.num_layers - 1,))

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        bound, ids = self._bound, self._bound.draft_to_target_ids
        hidden, root_logits = self._hidden_states(sequences)
        self._rounds += 1
        # One multiplication by the head: (B, levels, draft vocabulary).
        logits = bound.head(torch.stack(bound.block(hidden, self.heads), dim=1))
        if root_logits is not None:
            first = root_logits if ids is None else root_logits[:, ids]
            logits = torch.cat([first[:, None].to(logits.dtype), logits], dim=1)

        def draft_logits(level: TreeLevel) -> torch.Tensor:
            # A head's logits do not depend on the path. Not by an index tensor, which would be copied to the device.
            selected = torch.stack([logits[i, level.depth, None] for i in level.sequence_indices])
            return selected.expand(-1, level.tokens.shape[1], -1)

        # All levels are computed already: one more costs nothing.
        limit = None if limit is None else replace(limit, min_expected_gain=0.0)
        return self.grow(sequences, draft_logits, ids, logits.device, limit)

    def _hidden_states(self, sequences: SequenceOf[Sequence]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states (B, hidden) of the target's last layer, before its final norm: with a self-drafter those of the
        roots, and its logits (B, vocabulary) there; else those of the tokens before the roots, and None."""
        store, logits = self._store, None
        positions = [s.length - 2 for s in sequences]
        if self.self_drafter is not None:
            self.self_drafter.update_views(sequences)
            roots = [TokenTree((s.output[-1],), (-1,)) for s in sequences]
            logits = torch.stack([of_tree[0] for of_tree in self.self_drafter.verify(sequences, roots)])
            store = self.self_drafter.cache.store
            positions = [store.lengths[s.slot] for s in sequences]  # scratch entries after the view
        assert store.features is not None
        return torch.stack([store.features[s.slot, i] for s, i in zip(sequences, positions, strict=True)]), logits

    def observe(self, round_result: RoundResult) -> None:
        if self.self_drafter is not None:
            self.self_drafter.observe(round_result)

    def release(self, sequence: Sequence) -> None:
        if self.self_drafter is not None:
            self.self_drafter.release(sequence)


register(
    Kind(
        "heads",
        HeadsDrafter,
        "a few trained heads predict the next tokens from one hidden state of the model, at next to no cost",
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
