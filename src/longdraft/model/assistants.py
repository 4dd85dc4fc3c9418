"""Gemma 4's assistants: small models without keys and values of their own, which attend to those of the target.

transformers has their classes. Here their attention is a function of the caller, and the target's rows are found: those
of the last layer of each kind (full attention, sliding windows) that has keys and values of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longdraft.attention.block import Block
from longdraft.attention.sdpa import one_text
from longdraft.errors import CheckpointError, UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.memory.windows import WindowStates
from longdraft.model import calls, hosting
from longdraft.model.checkpoints import check_folder, load_weights, quiet, reading
from longdraft.model.layout import Layout
from longdraft.model.runner import TargetRunner

FULL, SLIDING = "full_attention", "sliding_attention"
# (kind of layer, q (Hq, N, d), scale) -> (Hq, N, d)
Attend = Callable[[str, torch.Tensor, float], torch.Tensor]


def _attend(
    attend: Attend, module: nn.Module, query: torch.Tensor, *_: Any, scaling: float = 1.0, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention by the caller's function; keys and values are stand-ins."""
    out = attend(str(module.layer_type), query[:, :, 0].transpose(0, 1), scaling)
    return out.transpose(0, 1)[:, None].contiguous(), None


@dataclass(frozen=True)
class Described:
    """Sizes of an assistant: its target's hidden size, tokens it knows, its weights."""

    backbone: int
    vocabulary: int
    parameters: int


def describe(folder: Path) -> Described:
    """Reads an assistant's configuration, and no weights.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    with reading(folder, f"{folder} is no assistant that this version of transformers can read"), quiet():
        check_folder(folder)
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        count = sum(p.numel() for p in model.parameters())
        return Described(int(config.backbone_hidden_size), int(config.get_text_config().vocab_size), count)


def load(folder: Path, runner: TargetRunner) -> Assistant:
    """An assistant in a target's dtype and on its device.

    Raises:
        CheckpointError: it cannot be read, is incomplete, or has heads of other sizes than the target.
        UnsupportedModelError: the target keeps no rows that an assistant reads.
    """
    model = load_weights(str(folder), runner.kv_shape.dtype, runner.device)
    return Assistant(model, _rows_of(runner), folder)


@dataclass(frozen=True)
class _Rows:
    """Where the target's rows of a kind of layer lie.

    Attributes:
        window: index among the store's windows; None for rows of the whole text.
        layer: number within these rows. heads, size: of keys and values.
    """

    window: int | None
    layer: int
    heads: int
    size: int


class Assistant:
    """An assistant and its target's rows.

    Raises:
        CheckpointError: its heads do not fit the target's.
    """

    def __init__(self, model: PreTrainedModel, rows: Mapping[str, _Rows], folder: Path) -> None:
        self._model: Any = model
        self._rows = rows
        self._text: Any = self._model.model
        config = model.config.get_text_config()
        config._attn_implementation = self._text.config._attn_implementation = hosting.IMPLEMENTATION
        for kind in set(config.layer_types):
            layer = next(x.self_attn for x in self._text.layers if x.self_attn.layer_type == kind)
            found = rows.get(kind)
            heads = config.num_attention_heads // layer.num_key_value_groups
            if found is None or (found.heads, found.size) != (heads, layer.head_dim):
                has = "none" if found is None else f"{found.heads} of size {found.size}"
                raise CheckpointError(
                    f"The assistant in {folder} reads {heads} KV heads of size {layer.head_dim} of layers of the kind "
                    f"{kind}; this target has {has}. Load the target it was made for."
                )

    def step(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """One step for N nodes.

        Args:
            x: (N, 2 backbone) embedding and hidden state of each, side by side. positions: (N,).
            attend: to the target's rows; :meth:`attending` makes it.

        Returns:
            Logits (N, vocabulary), and hidden states (N, backbone) for the next step.
        """
        model = self._model
        rows = model.pre_projection(x)[:, None]  # a node a text: none sees another
        stand_in = x.new_empty(1, 1, 1, 1)
        kinds = (FULL, SLIDING)
        out = self._text(
            inputs_embeds=rows,
            attention_mask=dict.fromkeys(kinds),
            position_ids=positions[:, None],
            shared_kv_states=dict.fromkeys(kinds, (stand_in, stand_in)),
            use_cache=False,
            longdraft_attend=partial(_attend, attend),
        ).last_hidden_state[:, 0]
        return self._logits(out), model.post_projection(out)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(N, hidden) -> (N, vocabulary). With groups of tokens, those of the best groups alone are told apart."""
        head, groups = self._model.lm_head, self._model.masked_embedding
        if groups is None:
            logits: torch.Tensor = head(hidden)
            return logits
        best = groups.centroids(hidden).topk(groups.centroid_intermediate_top_k, dim=-1).indices
        tokens = groups.token_ordering.long().view(groups.num_centroids, -1)[best].flatten(1)
        said = torch.einsum("nh,nth->nt", hidden, head.weight[tokens])
        nothing = hidden.new_full((len(hidden), head.weight.shape[0]), torch.finfo(hidden.dtype).min)
        return nothing.scatter(1, tokens, said)

    def attending(self, runner: TargetRunner, store: KVStore, slots: Sequence[int]) -> Attend:
        """Attends with nodes of some sequences, as many of each, to the rows before their roots."""
        lengths = [store.readable(slot) for slot in slots]

        def attend(kind: str, q: torch.Tensor, scale: float) -> torch.Tensor:
            place = self._rows[kind]
            queries = q.unflatten(1, (len(slots), -1)).transpose(0, 1)  # (B, Hq, W, d)
            if place.window is None:
                keys, values = (x[:, : place.heads, :, : place.size] for x in store.layer(place.layer))
                block = Block.make(slots, lengths, queries.shape[2], device=q.device)
                out = runner.prefix_attend(queries, keys, values, block, scale)
            else:
                windows = [states for states in store.states if isinstance(states, WindowStates)][place.window]
                keys, values = (x[:, : place.heads, :, : place.size] for x in windows.layer(place.layer))
                each = []
                for rows, slot, length in zip(queries, slots, lengths, strict=True):
                    start = windows.starts[slot]
                    seen = slice(windows.shape.span.first(length) - start, length - start)
                    k, v = (x[slot, :, seen].to(rows.dtype) for x in (keys, values))
                    each.append(one_text(rows, k, v, scale=scale))
                out = torch.stack(each)
            return out.transpose(0, 1).flatten(1, 2)

        return attend


def _rows_of(runner: TargetRunner) -> dict[str, _Rows]:
    layout: Layout = runner.twin.layout
    recorded = calls.known(runner.twin.model)
    if recorded is None or runner.share is not None or layout.own:
        raise UnsupportedModelError(f"{type(runner.model).__name__} keeps no rows as Gemma 4's assistants read them.")
    found: dict[str, _Rows] = {}
    for place, call in zip(layout.places, recorded.calls, strict=True):
        if place.writes:
            kind = FULL if place.window is None else SLIDING
            found[kind] = _Rows(place.window, place.layer, call.kv_heads, call.head_dim)
    return found
