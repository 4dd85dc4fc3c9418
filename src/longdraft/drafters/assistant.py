"""Gemma 4's assistants: a small model that reads the target's own KV and continues its last hidden state.

    h_0 = the target's last hidden state, behind its final norm, at the token before the root
    x_i = pre_projection([embed(token_i), h_i])             embed: the target's
    o_i = layers(x_i)                                       queries alone; keys and values are the target's
    logits of token_{i+1} = head(o_i);   h_{i+1} = post_projection(o_i)

Every layer attends to the rows of the target's last layer of its kind, full or sliding, and every drafted token to the
same rows from the root's position. So it needs no memory and reads no prompt. transformers has the classes
(``gemma4_assistant``, ``gemma4_unified_assistant``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.tree_drafter import TreeDrafter
from longdraft.drafts.draft import Draft
from longdraft.drafts.kinds import Kind, register
from longdraft.engine.sequence import Sequence
from longdraft.errors import CheckpointError, UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model import assistants
from longdraft.model.assistants import Assistant
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import norm_before_head
from longdraft.options import Options, parse
from longdraft.trees.level import Level
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import TokenTree

KIND = "assistant"


@dataclass(frozen=True)
class BoundAssistant:
    """An assistant on its target, whose embedding and final norm it borrows."""

    assistant: Assistant
    embedding: nn.Module
    norm: nn.Module


class AssistantDraft(Draft[BoundAssistant]):
    """An assistant's folder. Its weights are read when it is bound."""

    kind = KIND

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self._described = assistants.describe(self.folder)

    @classmethod
    def load(cls, folder: Path | str) -> AssistantDraft:
        """Reads an assistant's configuration.

        Raises:
            CheckpointError: transformers cannot read it.
        """
        return cls(folder)

    @property
    def parameters(self) -> int:
        return self._described.parameters

    def check(self, runner: TargetRunner) -> None:
        own, target = self._described, runner.parts.description
        wanted = {"hidden_size": own.backbone, "vocab_size": own.vocabulary}
        if not str(target["model_type"]).startswith("gemma4") or any(target[n] != x for n, x in wanted.items()):
            raise CheckpointError(
                f"The assistant in {self.folder} was made for a Gemma 4 with {own.vocabulary} tokens and a hidden size "
                f"of {own.backbone}; this target is {target['model_type']} with {target['vocab_size']} and "
                f"{target['hidden_size']}. Load the target it was made for."
            )

    def make(self, runner: TargetRunner) -> BoundAssistant:
        norm = norm_before_head(runner.model)
        if norm is None:
            raise UnsupportedModelError(f"{type(runner.model).__name__} has no norm before its head.")
        return BoundAssistant(assistants.load(self.folder, runner), runner.parts.embedding, norm)


class AssistantDrafter(TreeDrafter):
    """Drafts trees with an assistant.

    Args:
        draft: the assistant.
        options: of :class:`TreeOptions`.

    Raises:
        ValueError: for sizes that make no tree.
    """

    options: ClassVar[tuple[type[Options], ...]] = (TreeOptions,)

    def __init__(self, draft: AssistantDraft, **options: Any) -> None:
        (tree,) = parse(KIND, options, *self.options)
        self.tree = tree.kind("dynamic")
        self.draft = draft
        self._bound: BoundAssistant | None = None

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The last layer."""
        return (runner.depth - 1,)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Loads the assistant.

        Raises:
            CheckpointError: it was made for another target.
            UnsupportedModelError: the target keeps no rows that an assistant reads.
        """
        self._bound = self.draft.bound(runner)
        self._runner, self._store = runner, store

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        assert self._bound is not None
        bound, features = self._bound, self._store.features
        assert features is not None
        # For each sequence, (W, backbone): states of the last level's nodes.
        states: dict[int, torch.Tensor] = {}
        roots = [len(s.prompt) + len(s.output) - 1 for s in sequences]

        def expand(level: Level) -> torch.Tensor:
            self.forwards += 1
            width = level.tokens.shape[1]
            if level.depth == 0:
                # The root has no hidden state yet: the row before it.
                rows = [features[sequences[row].slot, roots[row] - 1] for row in level.rows]
                hidden = bound.norm(torch.stack(rows))
            else:
                hidden = torch.cat([states[row][level.parents[i]] for i, row in enumerate(level.rows)])
            x = torch.cat([bound.embedding(level.tokens.flatten()), hidden], -1)
            positions = on_device([roots[row] for row in level.rows for _ in range(width)], x.device)
            slots = [sequences[row].slot for row in level.rows]
            attend = bound.assistant.attending(self._runner, self._store, slots)
            logits, hidden = bound.assistant.step(x, positions, attend)
            states.update(zip(level.rows, hidden.split(width), strict=True))
            return logits.view(len(level.rows), width, -1)

        return self.grow(sequences, expand, None, self._runner.device, limit)


register(
    Kind(
        KIND,
        AssistantDrafter,
        "Gemma 4's assistants: a small model that reads the model's own KV cache and its last hidden state",
        "Google 2026, Gemma 4",
        load=AssistantDraft.load,
        tensors=lambda names: {"pre_projection.weight", "post_projection.weight"} <= set(names),
    )
)
