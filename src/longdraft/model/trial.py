"""Tries a model out before it is hosted: a short text and a tree of tokens, compared with the model's own forward.

Flags and configurations say too little: attention may be computed beside transformers' interface, positions may be
counted by a cache, scores may have a bias. What is wrong with three rows is wrong with a text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from longdraft.attention.reference import attend
from longdraft.attention.transfer import on_device
from longdraft.errors import LongdraftError, UnsupportedModelError, reason_of
from longdraft.memory.store import KVStore
from longdraft.model import calls, hosting, own_code, positions, quantised, recurrent, stored
from longdraft.model.checkpoints import quiet
from longdraft.model.layout import layout_of
from longdraft.model.model_copy import copy_without_hooks

# Behind a text, a tree of three tokens: two roots, and a child of the second one.
_TEXT, _PIECE = 5, 2
_TREE = [[True, False, False], [False, True, False], [False, True, True]]
_DEPTHS = (0, 0, 1)
# Windows and chunks are cut to fewer tokens than these, so that they slide.
_WINDOW = 4
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Largest relative difference of a row's logits in float32, and in 16 bits.
_CLOSE, _ROUNDED = 1e-4, 0.1
# What models call their cache, in the words of transformers 5.24 and 5.17.
_CACHES = ("cache", "past_key_values", "cache_params")
# Rounding can send a token to another expert, so other tokens are tried where one text fails.
_TRIALS = 3


def try_out(model: PreTrainedModel) -> calls.Recorded:
    """Hosts a copy of a model without its hooks. Returns what was recorded of a forward.

    Raises:
        UnsupportedModelError: the hosted copy fails, or computes something else than the model.
    """
    copy = copy_without_hooks(model)
    stored.use_int8(copy, False)
    quantised.make_plain(copy)
    positions.install(copy)
    recurrent.install(copy)
    try:
        return _tried(copy, by_itself=False)
    except UnsupportedModelError as error:
        sparse = "sparse" in str(getattr(hosting.decoder_config(copy), "attention_type", ""))
        if recurrent.mixers_of(copy) or copy._is_stateful or sparse:  # it may keep more than keys and values
            raise
        try:
            return _tried(copy, by_itself=True)
        except UnsupportedModelError:
            raise error from None


def _tried(copy: PreTrainedModel, by_itself: bool) -> calls.Recorded:
    """Compares a copy's rows in a tree, and returns what was recorded.

    Args:
        by_itself: the model attends with code of its own (:mod:`.own_code`).
    """
    name, config = type(copy).__name__, hosting.decoder_config(copy)
    own = config._attn_implementation
    generator = torch.Generator().manual_seed(0)
    vocabulary = stored.weight_shape(copy.get_input_embeddings())[0]
    try:
        # On a CPU transformers advises to install kernels for GPUs.
        with _short_windows(copy), quiet() if copy.device.type == "cpu" else nullcontext():
            for _ in range(_TRIALS):
                tokens = torch.randint(vocabulary, (_TEXT + len(_TREE),), generator=generator, device="cpu").tolist()
                config._attn_implementation = own
                try:
                    expected = _own(copy, tokens, by_itself or bool(recurrent.mixers_of(copy)))
                except Exception as error:  # the model's own code, with inputs that it may not take
                    raise UnsupportedModelError(f"{name} computes no text by itself: {reason_of(error)}.") from error
                if not by_itself:
                    hosting.switch_on(copy)
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
        return _recorded(copy, tokens, by_itself)
    finally:
        config._attn_implementation = own


@contextmanager
def _short_windows(copy: PreTrainedModel) -> Iterator[None]:
    """Inside, windows and chunks are so short that they slide in the trial's text."""
    own = [part for part in copy.modules() if not isinstance(part, PreTrainedModel)]
    cut: list[tuple[Any, str, int]] = []
    for part in (hosting.decoder_config(copy), *own):
        for name in _WINDOWS:
            size = vars(part).get(name)
            if isinstance(size, int) and size > _WINDOW:
                setattr(part, name, _WINDOW)
                cut.append((part, name, size))
    try:
        yield
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
        text = on_device([tokens[:_TEXT] + [tokens[_TEXT + i] for i in path]], copy.device)
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
    calls.recorded[copy] = _recorded(copy, tokens, by_itself)
    layout, rows = layout_of(copy), _TEXT + len(_TREE)
    store = KVStore(layout.shape, 1, rows, copy.device)
    store.keep_states(*hosting.new_states(copy, 1, rows))
    run = own_code.run if by_itself else hosting.run
    for piece in (tokens[:_PIECE], tokens[_PIECE:_TEXT]):  # as long prompts are read: a token sees none behind it
        text = store.block([0], [piece], prompt=True)
        run(hosting.decoder_of(copy), hosting.Hosted(store, text, attend, layout))
        store.commit(0, range(len(piece)))
    mask = torch.tensor([_TREE], dtype=torch.bool, device="cpu")
    block = store.block([0], [tokens[_TEXT:]], depths=[_DEPTHS], mask=mask)
    logits: torch.Tensor = run(copy, hosting.Hosted(store, block, attend, layout)).logits
    return logits[0]


@torch.inference_mode()
def _recorded(copy: PreTrainedModel, tokens: list[int], by_itself: bool) -> calls.Recorded:
    """The records of a forward of two tokens."""
    few, recording = on_device([tokens[:2]], copy.device), calls.Recording()
    if by_itself:
        recording.calls += own_code.learn(copy, few)
    else:
        with hosting.computing(recording):
            copy(input_ids=few, position_ids=_positions(few), use_cache=False)
    found, shapes = tuple(recording.calls), recurrent.shapes_of(recording)
    if not (found or shapes):
        raise UnsupportedModelError(
            f"{type(copy).__name__} does not go through transformers' attention interface, so longdraft cannot host it."
        )
    return calls.Recorded(found, shapes, by_itself)


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def _agree(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the rows are equal up to rounding; in 16 bits, where experts are often undecided, most of them."""
    if got.shape != expected.shape:
        return False
    if bool(torch.isnan(expected).any()):  # a damaged model is noticed when it is used
        return True
    apart = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    exact = got.dtype in (torch.float32, torch.float64)
    return bool((apart < _CLOSE).all()) if exact else bool(apart.median() < _ROUNDED)
