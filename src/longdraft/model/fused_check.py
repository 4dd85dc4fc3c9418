"""Compares decoder layers that our kernels compute with the model's own code, on made-up rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from longdraft.attention.block import Block
from longdraft.attention.reference import attend
from longdraft.attention.transfer import on_device
from longdraft.errors import reason_of
from longdraft.memory.recurrent import RecurrentStates
from longdraft.memory.store import KVStore
from longdraft.memory.windows import WindowStates
from longdraft.model import hosting
from longdraft.model.layer_rows import LayerKinds
from longdraft.model.layout import layout_of
from longdraft.native.boundary import FLOATS, WHOLE

logger = logging.getLogger("longdraft")

# Largest difference between both results, relative to the largest number: in float32, and in 16 bits in steps of the
# dtype, where a sum in another order is now and then rounded the other way.
_TOLERANCE, _STEPS = 1e-4, 6


class Forward(Protocol):
    """The forward of one layer by kernels.

    Attributes:
        d: head size; None for a layer that does not attend.
    """

    @property
    def d(self) -> int | None: ...

    def __call__(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any: ...


def made_up(model: PreTrainedModel, far: bool = False) -> tuple[Block, list[KVStore]]:
    """A tree of three tokens behind a text of five, and two stores with the same keys and values.

    Args:
        far: the positions are the last ones that the model takes.
    """
    text, vocabulary = 5, int(hosting.decoder_config(model).vocab_size)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], **WHOLE).bool()
    stores = [KVStore(hosting.kv_shape(model), 1, text + 3, model.device) for _ in range(2)]
    for store in stores:
        store.keep_states(*hosting.new_states(model, 1, text + 3))
        for t in (*_kept(store), *_states(store)):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1), **FLOATS))
    first = max(100, hosting.context_length(model) - text - 2) if far else 100
    tokens, places = [[i % vocabulary for i in (1, 2, 3)]], [[first + text, first + text + 1, first + text + 1]]
    return Block.make([0], [text], 3, tree[None], model.device, tokens=tokens, positions=places), stores


@torch.inference_mode()
def layers_agree(model: PreTrainedModel, kinds: LayerKinds, forwards: Sequence[Forward]) -> bool:
    """Compares every layer with its own code, on made-up rows, near and far."""
    theirs, size = hosting.decoder_layers(model), int(hosting.decoder_config(model).hidden_size)
    made_up_rows = torch.randn(1, 3, size, generator=torch.Generator().manual_seed(0), **FLOATS)
    x = on_device(made_up_rows.to(model.dtype), model.device)
    on_gpu = model.device.type != "cpu"
    try:
        for far in (False, True):
            block, stores = made_up(model, far)
            plain, ours = (hosting.Hosted(store, block, attend, layout_of(model)) for store in stores)
            for index, (layer, own) in enumerate(zip(theirs, forwards, strict=True)):
                position = kinds.rotate(kinds.ropes[kinds.numbers[index]] or kinds.usual, x, block.positions)
                if own.d is not None and position[0].shape[-1] > own.d:
                    return False
                # layer.forward, so that the user's hooks do not see made-up rows.
                with hosting.computing(plain):
                    expected = layer.forward(x, position_embeddings=position, use_cache=False, longdraft_hosted=plain)
                result = own(x, position_embeddings=position, longdraft_hosted=ours)
                if not (close(result, expected) and same_kv(stores)):
                    logger.info("Layer %d is not of a kind that our kernels compute: its own code is taken.", index)
                    return False
            if not all(close(b, a) for a, b in zip(*map(_states, stores), strict=True)):
                logger.info("Recurrent layers keep other states than our kernels: their own code is taken.")
                return False
    except Exception as error:  # a model, a compiler or a driver can raise any type
        # A layer may read an argument that is left out here. Any other attribute that is missing is a fault.
        if isinstance(error, AttributeError) and error.obj is not None:
            raise
        # On a GPU nothing but what is missing on the machine fails here: layers of other kinds are known before.
        level = logging.WARNING if on_gpu else logging.INFO
        logger.log(level, "Decoder layers run by their own code, not by fused kernels: %s", reason_of(error))
        return False
    return True


def _kept(store: KVStore) -> list[torch.Tensor]:
    """All keys and values of a store, those of windows too."""
    kept = [store, *(states for states in store.states if isinstance(states, WindowStates))]
    return [getattr(each, name) for each in kept for name in ("keys", "values")]


def _states(store: KVStore) -> list[torch.Tensor]:
    """All states of a store's recurrent layers, and what is kept of unverified rows."""
    found = [states for states in store.states if isinstance(states, RecurrentStates)]
    layers = [states.layer(0, number) for states in found for number in states.shapes]
    kept = [(*a.now.windows.values(), a.now.state, *a.inputs.values(), *a.rows) for a in layers]
    return [t for each in kept for t in each if t is not None]


def same_kv(stores: list[KVStore]) -> bool:
    """True if two stores hold the same keys and values, up to rounding."""
    return all(close(ours, theirs) for theirs, ours in zip(*map(_kept, stores), strict=True))


def close(a: object, b: object) -> bool:
    """True if both are tensors that differ by no more than a result of ours may differ from ``b``, the model's own."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    apart, size, step = (a.float() - b.float()).abs(), b.float().abs(), torch.finfo(b.dtype).eps
    if b.element_size() == 2:
        return bool((apart.max() <= _STEPS * step * size.max()) & (apart.mean() <= step * size.mean()))
    return bool(apart.max() <= _TOLERANCE * size.max())
