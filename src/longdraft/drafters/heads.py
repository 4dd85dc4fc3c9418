"""Chained heads: predict the next tokens from one hidden state of the target (Wu et al. 2025, TokenSwift, section 3).

    h_i = h_{i-1} + W_i RMSNorm(h_{i-1})        i = 1 .. heads
    logits_i = target_head(RMSNorm(h_i))        the target's head, by reference

h_0 is the target's last hidden state, before the final norm, of the token before the root. The last verification wrote
h_0 to the KV store, so drafting runs no forward, only one multiplication by the target's head (its output projection).
Draft head i predicts the i-th token after the root.

The paper starts from the root's hidden state, computed on a part of the KV: :mod:`longdraft.drafters.tokenswift`.
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
from longdraft.engine.drafter import DraftNeeds
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.quant.stored import quantize_for_draft
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import parallel_linear
from longdraft.options import Options, option, parse
from longdraft.trees.level import LevelExpander, TreeLevel, logits_or_topk
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree, root_tree

# Scale of the final norm of untrained heads. Such a head repeats the target's prediction; small logits make it unsure.
INITIAL_NORM_SCALE = 0.3


@dataclass(frozen=True)
class HeadsShape:
    """Sizes of the heads."""

    hidden_size: int  # the target's
    heads: int  # number of draft heads
    rms_norm_eps: float = 1e-6
    own_norms: bool = False  # each draft head has its own norm before the target's head, as in TokenSwift's checkpoints


class _Head(nn.Module):
    """One draft head: maps the hidden state that predicts a token to the hidden state that predicts the next token."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = h + self.proj(self.norm(h))
        return out


class HeadsBlock(nn.Module):
    """The draft heads, and the norm before the target's head: one norm for all draft heads, or one for each."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        self.heads = nn.ModuleList(_Head(shape) for _ in range(shape.heads))
        size, eps = shape.hidden_size, shape.rms_norm_eps
        if shape.own_norms:
            self.norms = nn.ModuleList(nn.RMSNorm(size, eps) for _ in range(shape.heads))
        else:
            self.norm = nn.RMSNorm(size, eps)

    def initialize(self, final_norm: torch.Tensor, hidden_rms: float = 1.0) -> None:
        """Sets zero projections, so that at first every draft head repeats the target's prediction.

        Args:
            final_norm: (hidden,) weight of the target's final norm.
            hidden_rms: root mean square of the target's hidden states. Used as the weight of the draft heads' norms, so
                that a training step changes hidden states by a fraction that does not depend on their size.
        """
        with torch.no_grad():
            for name, weight in self.heads.named_parameters():
                weight.fill_(hidden_rms if name.endswith("norm.weight") else 0.0)
            self.norm.weight.copy_(INITIAL_NORM_SCALE * final_norm)

    def forward(self, h: torch.Tensor, heads: int | None = None) -> list[torch.Tensor]:
        """Converts hidden states h (T, hidden) to inputs (T, hidden) of the target's head, one for each draft head.
        ``heads``: number of draft heads to run; None: all."""
        outputs = []
        for i, head in enumerate(self.heads[:heads]):
            h = head(h)
            outputs.append(self.norms[i](h) if self.shape.own_norms else self.norm(h))
        return outputs


KIND = "tokenswift"


class BoundHeads(NamedTuple):
    """Draft heads in the target's dtype and on the target's device."""

    block: HeadsBlock
    head: Callable[[torch.Tensor], torch.Tensor]  # the target's head: (..., hidden) -> (..., draft vocabulary)
    draft_to_target_ids: torch.Tensor | None  # (draft vocabulary,) target ids; None: both vocabularies are the same


class HeadsDraft(TrainedDraft[BoundHeads]):
    """Trained draft heads from a folder."""

    kind, layer_count_key = KIND, "heads"
    shape_type, module_type = HeadsShape, HeadsBlock

    @classmethod
    def load(cls, folder: Path | str) -> HeadsDraft:
        """Reads a draft folder in our layout, or the folder of a model that TokenSwift's authors published with heads.

        Raises:
            CheckpointError: the folder is unreadable or has no heads; a tensor is missing, unexpected or misshapen.
        """
        published = tokenswift_heads.read(folder)
        return cls(folder, draft_folder.load(folder, cls.kind) if published is None else published)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size}

    def make(self, runner: TargetRunner) -> BoundHeads:
        head, ids = self.head(runner)
        if draft_kernels(runner, runner.kv_shape.head_dim) is not None:
            head = quantize_for_draft(head)
        return BoundHeads(self.load_module(runner), parallel_linear(head), ids)


@dataclass(frozen=True)
class HeadOptions(Options):
    """Options of trained heads."""

    heads: int | None = option(min=1, help="number of the draft's heads to use", usual="all")


class HeadsDrafter(TreeDrafter):
    """Drafts trees with chained heads.

    Args:
        draft: trained draft heads.
        options: fields of :class:`HeadOptions` and :class:`TreeOptions`. The default tree is static, as in the paper.
        _self_drafter: the target on a part of its KV (TokenSwift), which computes the roots' hidden states and drafts
            the first level; None: draft heads start from the hidden states of the tokens before the roots.
    """

    options = (HeadOptions, TreeOptions)

    def __init__(self, draft: HeadsDraft, _self_drafter: SelfDrafter | None = None, **options: Any) -> None:
        head_options, tree_options = parse("tokenswift", options, *self.options)
        num_heads = draft.shape.heads
        self.heads = head_options.heads or num_heads
        if self.heads > num_heads:
            raise ValueError(
                f"heads must be a whole number from 1 to {num_heads} (the draft has no more), got {self.heads}"
            )
        self.draft, self.self_drafter = draft, _self_drafter
        max_depth = self.heads + (_self_drafter is not None)  # one level for each draft head, and the self-drafter's
        tree = tree_options.config("static")
        if tree.depth > max_depth and (tree_options.widths is not None or tree_options.depth is not None):
            raise ValueError(f"a tree of {tree.depth} levels is too deep: these heads draft {max_depth} levels at most")
        if _self_drafter is not None and tree.name == "static" and not tree.is_user_defined:
            tree = replace(tree, branching=(1, *tree.branching))  # the first level is the self-drafter's top-1 token
        self.tree = tree.limit_depth(max_depth)
        self._num_rounds = 0

    @property
    def forwards(self) -> int:  # type: ignore[override]
        """Number of multiplications by the target's head, or of the self-drafter's forwards if there are more."""
        return max(self._num_rounds, 0 if self.self_drafter is None else self.self_drafter.forwards)

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        """Returns the needs of the self-drafter, which computes the hidden states; without one, the last layer's."""
        return DraftNeeds((runner.num_layers - 1,)) if self.self_drafter is None else self.self_drafter.needs(runner)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self._bound, self._store = self.draft.bind(runner), store
        if self.self_drafter is not None:
            self.self_drafter.bind(runner, store, (runner.num_layers - 1,))

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        bound, ids = self._bound, self._bound.draft_to_target_ids
        hidden, root_logits = self._hidden_states(sequences)
        self._num_rounds += 1
        logits = bound.head(torch.stack(bound.block(hidden, self.heads), dim=1))  # (B, levels, draft vocabulary)
        if root_logits is not None:
            first_level = root_logits if ids is None else root_logits[:, ids]
            logits = torch.cat([first_level[:, None].to(logits.dtype), logits], dim=1)

        def expand(level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
            # A draft head's logits do not depend on the path. ``stack`` avoids copying an index tensor to the device.
            selected = torch.stack([logits[i, level.depth, None] for i in level.sequence_indices])
            return logits_or_topk(selected.expand(-1, level.tokens.shape[1], -1), top_k)

        # The logits of all levels are computed already, so one more level costs nothing.
        limit = None if limit is None else replace(limit, min_expected_gain=0.0)
        return self.grow(sequences, LevelExpander(expand, logits.device, ids), limit)

    def _hidden_states(self, sequences: SequenceOf[Sequence]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns h_0 (B, hidden) of each sequence, and the first level's logits (B, vocabulary). With a self-drafter,
        both are computed at the roots. Without, h_0 is of the tokens before the roots, and the logits are None."""
        store, logits = self._store, None
        entries = [s.length - 2 for s in sequences]  # the root, whose KV is not computed yet, is token length - 1
        if self.self_drafter is not None:
            self.self_drafter.update_views(sequences)
            roots = [root_tree(s.output[-1]) for s in sequences]
            logits = torch.stack([tree_logits[0] for tree_logits in self.self_drafter.verify(sequences, roots)])
            store = self.self_drafter.cache.store
            entries = [store.lengths[s.slot] for s in sequences]  # the first entry after each view
        assert store.features is not None
        return torch.stack([store.features[s.slot, i] for s, i in zip(sequences, entries, strict=True)]), logits

    def observe(self, round_result: RoundResult) -> None:
        if self.self_drafter is not None:
            self.self_drafter.observe(round_result)

    def release(self, sequence: Sequence) -> None:
        if self.self_drafter is not None:
            self.self_drafter.release(sequence)
