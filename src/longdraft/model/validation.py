"""Compares what longdraft computes with the model's own code, on a tree of tokens behind a short text.

Flags and configurations say too little: attention may be computed beside transformers' interface, positions may be
counted by a cache, scores may have a bias. What is wrong with three rows is wrong with a text. A hosted model is tried
out (:func:`validate_hosting`), and so are the kernels that compute its layers (:func:`outputs_agree`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.reference import attend
from longdraft.attention.transfer import to_device
from longdraft.errors import LongdraftError, UnsupportedModelError, reason_of
from longdraft.memory.recurrent import RecurrentStates
from longdraft.memory.store import KVStore
from longdraft.memory.windows import WindowKVCache
from longdraft.model import custom_attention, hosting, positions, quantised, recurrent, stored, stored_model
from longdraft.model.checkpoints import quiet
from longdraft.model.layout import AttentionTrace, KVLayout, build_layout, layout_of, traced_layouts
from longdraft.model.model_copy import copy_without_hooks
from longdraft.native.boundary import CPU_FLOAT32

# Behind a text, a tree of three tokens: two roots, and a child of the second one.
_TEXT, _PIECE = 5, 2
_TREE = [[True, False, False], [False, True, False], [False, True, True]]
_DEPTHS = (0, 0, 1)
# Windows and chunks are cut to fewer tokens than these, so that they slide.
_WINDOW = 4
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Largest relative difference: in float32, and in 16 bits in steps of the dtype, where a sum in another order is now and
# then rounded the other way.
_TOLERANCE, _STEPS = 1e-4, 6
# Largest relative difference of most rows' logits in 16 bits, in which experts are often undecided.
_ROUNDED = 0.1
# What models call their cache, in the words of transformers 5.24 and 5.17.
_CACHES = ("cache", "past_key_values", "cache_params")
# Rounding can send a token to another expert, so other tokens are tried where one text fails.
_TRIALS = 3
# A result of ours, and the model's own.
OutputPair = tuple[torch.Tensor | None, torch.Tensor | None]
ComputePairs = Callable[[hosting.ForwardContext, hosting.ForwardContext], Iterable[OutputPair]]


@torch.inference_mode()
def outputs_agree(model: PreTrainedModel, compute: ComputePairs) -> bool:
    """Compares kernels with the model's own layers: results, keys, values and states of made-up tokens.

    There are two sequences, of which one is near the beginning and the other ends where the model's texts end.

    Args:
        compute: from the forwards of the model's own code and of the kernels, pairs of our results and theirs.
    """
    layout, vocabulary = layout_of(model), int(hosting.decoder_config(model).vocab_size)
    rows = _TEXT + len(_TREE)
    stores = [KVStore(layout.shape, 2, rows, model.device) for _ in range(2)]
    for store in stores:
        store.attach_states(*hosting.new_layer_states(model, 2, rows))
        for t in _kept(store):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(1), **CPU_FLOAT32))
    far = max(100 + _TEXT, hosting.context_length(model) - 2)
    places = [[first + depth for depth in _DEPTHS] for first in (100 + _TEXT, far)]
    tokens = [[i % vocabulary for i in (1, 2, 3)]] * 2
    mask = torch.tensor([_TREE] * 2, dtype=torch.bool, device="cpu")
    block = ForwardBatch.make([0, 1], [_TEXT] * 2, len(_TREE), mask, model.device, token_ids=tokens, positions=places)
    theirs, ours = (hosting.ForwardContext(store, block, attend, layout) for store in stores)
    pairs = [*compute(theirs, ours), *zip(*map(_kept, reversed(stores)), strict=True)]
    return all(_close(got, expected) for got, expected in pairs)


def _kept(store: KVStore) -> list[torch.Tensor]:
    """All keys and values of a store, and the states of recurrent layers with what is kept of unverified rows."""
    found = [store.keys, store.values]
    for states in store.states:
        if isinstance(states, WindowKVCache):
            found += [states.keys, states.values]
        elif isinstance(states, RecurrentStates):
            layers = [states.layer_state(slot, number) for slot in range(2) for number in states.shapes]
            kept = [
                (
                    *a.checkpoint.conv_states.values(),
                    a.checkpoint.recurrent_state,
                    *a.conv_inputs.values(),
                    *a.recurrence_inputs,
                )
                for a in layers
            ]
            found += [t for each in kept for t in each if t is not None]
    return found


def _close(got: object, expected: object) -> bool:
    """True if both are tensors that differ by no more than rounding."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor) or got.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    apart, size = (got.float() - expected.float()).abs(), expected.float().abs()
    if expected.element_size() == 2:
        step = torch.finfo(expected.dtype).eps
        return bool((apart.max() <= _STEPS * step * size.max()) & (apart.mean() <= step * size.mean()))
    return bool(apart.max() <= _TOLERANCE * size.max())


def validate_hosting(model: PreTrainedModel) -> KVLayout:
    """Hosts a copy of a model without its hooks. Returns its layout.

    Raises:
        UnsupportedModelError: the hosted copy fails, or computes something else than the model.
    """
    copy = copy_without_hooks(model)
    stored_model.set_int8(copy, False)
    quantised.replace_by_random_products(copy)
    positions.patch_position_ids(copy)
    recurrent.patch_mixers(copy)
    try:
        return _tried(copy, by_itself=False)
    except UnsupportedModelError as error:
        sparse = "sparse" in str(getattr(hosting.decoder_config(copy), "attention_type", ""))
        if recurrent.find_mixers(copy) or copy._is_stateful or sparse:  # it may keep more than keys and values
            raise
        try:
            return _tried(copy, by_itself=True)
        except UnsupportedModelError:
            raise error from None


def _tried(copy: PreTrainedModel, by_itself: bool) -> KVLayout:
    """Compares a copy's rows in a tree, and returns its layout.

    Args:
        by_itself: the model attends with code of its own (:mod:`.own_code`).
    """
    name, own = type(copy).__name__, hosting.decoder_config(copy)._attn_implementation
    generator = torch.Generator().manual_seed(0)
    vocabulary = stored.weight_shape(copy.get_input_embeddings())[0]
    try:
        # On a CPU transformers advises to install kernels for GPUs.
        with _short_windows(copy) as cut, quiet() if copy.device.type == "cpu" else nullcontext():
            for _ in range(_TRIALS):
                tokens = torch.randint(vocabulary, (_TEXT + len(_TREE),), generator=generator, device="cpu").tolist()
                hosting.set_attention(copy, own)
                try:
                    expected = _own(copy, tokens, by_itself or bool(recurrent.find_mixers(copy)))
                except Exception as error:  # the model's own code, with inputs that it may not take
                    raise UnsupportedModelError(f"{name} computes no text by itself: {reason_of(error)}.") from error
                if not by_itself:
                    hosting.set_attention(copy)
                try:
                    agree = _agree(_hosted(copy, tokens, by_itself), expected)
                except LongdraftError:
                    raise
                except Exception as error:
                    raise UnsupportedModelError(
                        f"{name} computes attention with code of its own, so longdraft cannot host it "
                        f"({reason_of(error)})."
                    ) from error
                if agree:
                    break
            else:
                raise UnsupportedModelError(
                    f"{name} computes something else than attention to the text before each token (a bias, a mask of "
                    "its own), so longdraft cannot host it exactly."
                )
        return _layout(copy, tokens, by_itself) if cut else traced_layouts[copy]
    finally:
        hosting.set_attention(copy, own)


@contextmanager
def _short_windows(copy: PreTrainedModel) -> Iterator[bool]:
    """Inside, windows and chunks are so short that they slide in the trial's text. Yields whether there are any."""
    own = [part for part in copy.modules() if not isinstance(part, PreTrainedModel)]
    cut: list[tuple[Any, str, int]] = []
    for part in (hosting.decoder_config(copy), *own):
        for name in _WINDOWS:
            size = vars(part).get(name)
            if isinstance(size, int) and size > _WINDOW:
                setattr(part, name, _WINDOW)
                cut.append((part, name, size))
    try:
        yield bool(cut)
    finally:
        for part, name, size in cut:
            setattr(part, name, size)


@torch.inference_mode()
def _own(copy: PreTrainedModel, tokens: list[int], stepwise: bool) -> torch.Tensor:
    """Logits (3, vocabulary) of the tree's rows, by the model's own forward of each path.

    Args:
        stepwise: tokens behind the text are computed one by one from the model's cache.
    """
    rows, given = [], "position_ids" in inspect.signature(type(copy).forward).parameters

    def forward(text: torch.Tensor, start: int, **more: Any) -> Any:
        # As ``generate`` does: some models count positions otherwise where they are not given any.
        place = {"position_ids": _positions(text) + start} if given else {}
        return copy(input_ids=text, **place, **more)

    for path in ([0], [1, 2]):
        text = to_device([tokens[:_TEXT] + [tokens[_TEXT + i] for i in path]], copy.device)
        if not stepwise:
            rows.append(forward(text, 0, use_cache=False).logits[0, -len(path) :])
            continue
        # Some recurrent layers compute a single token otherwise than several, and ``generate`` computes single ones.
        out = forward(text[:, :_TEXT], 0, use_cache=True)
        for i in range(_TEXT, text.shape[1]):
            name = next(name for name in _CACHES if out.get(name) is not None)
            out = forward(text[:, i : i + 1], i, use_cache=True, **{name: out[name]})
            rows.append(out.logits[0])
    return torch.cat(rows)


@torch.inference_mode()
def _hosted(copy: PreTrainedModel, tokens: list[int], by_itself: bool) -> torch.Tensor:
    """The same rows from our attention and our store."""
    layout = traced_layouts[copy] = _layout(copy, tokens, by_itself)
    rows = _TEXT + len(_TREE)
    store = KVStore(layout.shape, 1, rows, copy.device)
    store.attach_states(*hosting.new_layer_states(copy, 1, rows))
    run = custom_attention.run if by_itself else hosting.run
    for piece in (tokens[:_PIECE], tokens[_PIECE:_TEXT]):  # as long prompts are read: a token sees none behind it
        text = store.make_forward_batch([0], [piece], is_prefill=True)
        run(hosting.decoder_of(copy), hosting.ForwardContext(store, text, attend, layout))
        store.commit(0, range(len(piece)))
    mask = torch.tensor([_TREE], dtype=torch.bool, device="cpu")
    block = store.make_forward_batch([0], [tokens[_TEXT:]], depths=[_DEPTHS], mask=mask)
    logits: torch.Tensor = run(copy, hosting.ForwardContext(store, block, attend, layout)).logits
    return logits[0]


@torch.inference_mode()
def _layout(copy: PreTrainedModel, tokens: list[int], by_itself: bool) -> KVLayout:
    """The layout that follows from a forward of two tokens."""
    few, recording = to_device([tokens[:2]], copy.device), AttentionTrace()
    if by_itself:
        recording.calls += custom_attention.trace_cache_layers(copy, few)
    else:
        with hosting.forward_scope(recording):
            copy(input_ids=few, position_ids=_positions(few), use_cache=False)
    found, shapes = tuple(recording.calls), recurrent.recurrent_shapes(recording)
    if not (found or shapes):
        raise UnsupportedModelError(
            f"{type(copy).__name__} does not go through transformers' attention interface, so longdraft cannot host it."
        )
    return build_layout(copy, found, shapes, by_itself)


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def _agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the rows are equal up to rounding; in 16 bits, where experts are often undecided, most of them."""
    # A damaged model is noticed when it is used.
    if got.shape != expected.shape or bool(torch.isnan(expected).any()):
        return got.shape == expected.shape
    apart = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return bool(apart.median() < _ROUNDED if got.element_size() == 2 else (apart < _TOLERANCE).all())
