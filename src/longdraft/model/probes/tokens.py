"""Validates hosting and kernels: compares results with the model's own code, on a small tree after a short prefix.

A configuration does not tell whether a model bypasses transformers' attention interface, derives positions from its
cache, or adds a bias to scores. Computing three tokens shows it. :func:`validate_hosting` validates a hosted model, and
:func:`outputs_agree` the kernels that compute its layers.
"""

from __future__ import annotations

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
from longdraft.model import hosting, positions
from longdraft.model.compat import CACHE_NAMES
from longdraft.model.layout import AttentionTrace, KVLayout, build_layout
from longdraft.model.linear_attention import mixers
from longdraft.model.load.checkpoints import quiet
from longdraft.model.model_copy import copy_without_hooks
from longdraft.model.model_parts import context_length, decoder_config, decoder_of, takes_argument
from longdraft.model.quant import external, stored, stored_model
from longdraft.native.boundary import CPU_FLOAT32

# The prefix is prefilled in two chunks, the first of _CHUNK_LEN tokens.
_PREFIX_LEN, _CHUNK_LEN = 5, 2
# The tree has three nodes: two roots, and a child of the second root.
_TREE_MASK, _TREE_PATHS = [[True, False, False], [False, True, False], [False, True, True]], ([0], [1, 2])
_DEPTHS = (0, 0, 1)
_NUM_TOKENS = _PREFIX_LEN + len(_TREE_MASK)
# Windows and chunks of attention are shortened to this number of tokens, so that the few tokens already exceed them.
_SHORT_WINDOW = 4
_WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size")
# Largest difference that counts as rounding, relative to the largest number; for 16 bits, in the dtype's epsilons.
_TOLERANCE, _HALF_TOLERANCE_EPS = 1e-4, 6
# Largest median of the logits' relative differences in 16 bits, where rounding often changes a token's chosen experts.
_HALF_LOGITS_TOLERANCE = 0.1
# Rounding can route a token to another expert, so a failed comparison is repeated with other tokens.
_MAX_TRIALS = 3
# Our result, and the result of the model's own code.
OutputPair = tuple[torch.Tensor | None, torch.Tensor | None]
# (context for the model's own code, context for the kernels) -> pairs.
ComputePairs = Callable[[hosting.ForwardContext, hosting.ForwardContext], Iterable[OutputPair]]


@torch.inference_mode()
def outputs_agree(model: PreTrainedModel, layout: KVLayout, compute: ComputePairs) -> bool:
    """True if kernels and the model's own layers compute equal outputs, KV and recurrent states of made-up tokens.
    One of two sequences is near position 0, the other at the context's end. ``compute`` runs layers and kernels."""
    vocab_size = int(decoder_config(model).vocab_size)
    stores = [_new_store(model, layout, slots=2) for _ in range(2)]
    for store in stores:
        for tensor in _store_tensors(store):  # both stores get the same random numbers
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1), **CPU_FLOAT32))
    first_root = 100 + _PREFIX_LEN  # the roots' position in the first sequence: any small one but _PREFIX_LEN
    last_root = max(first_root, context_length(model) - 2)  # the child is the context's last token
    inputs: dict[str, Any] = {
        "token_ids": [[i % vocab_size for i in (1, 2, 3)]] * 2,
        "positions": [[root + depth for depth in _DEPTHS] for root in (first_root, last_root)],
    }
    mask = torch.tensor([_TREE_MASK] * 2, dtype=torch.bool, device="cpu")
    batch = ForwardBatch.make([0, 1], [_PREFIX_LEN] * 2, len(_TREE_MASK), mask, model.device, **inputs)
    reference, kernel = (hosting.ForwardContext(store, batch, attend, layout) for store in stores)
    pairs = [*compute(reference, kernel), *zip(*map(_store_tensors, reversed(stores)), strict=True)]
    return all(_is_close(actual, expected) for actual, expected in pairs)


def _new_store(model: PreTrainedModel, layout: KVLayout, slots: int) -> KVStore:
    store = KVStore(layout.shape, slots, _NUM_TOKENS, model.device)
    hosting.attach_states(store, layout)
    return store


def _store_tensors(store: KVStore) -> list[torch.Tensor]:
    """Returns all KV of a store with two slots, and its recurrent states with the inputs of uncommitted tokens."""
    tensors = [store.keys, store.values]
    for states in store.states:
        if isinstance(states, WindowKVCache):
            tensors += [states.keys, states.values]
        elif isinstance(states, RecurrentStates):
            for state in (states.layer_state(slot, index) for slot in range(2) for index in states.shapes):
                recurrent_state = state.checkpoint.recurrent_state
                tensors += state.checkpoint.conv_states.values()
                tensors += [] if recurrent_state is None else [recurrent_state]
                tensors += [*state.conv_inputs.values(), *state.recurrence_inputs]
    return tensors


def _is_close(actual: object, expected: object) -> bool:
    """True if both are tensors of equal shape that differ by no more than rounding."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor) or actual.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    difference, magnitude = (actual.float() - expected.float()).abs(), expected.float().abs()
    if expected.element_size() == 2:
        eps = torch.finfo(expected.dtype).eps
        max_is_small = difference.max() <= _HALF_TOLERANCE_EPS * eps * magnitude.max()
        return bool(max_is_small & (difference.mean() <= eps * magnitude.mean()))
    return bool(difference.max() <= _TOLERANCE * magnitude.max())


def validate_hosting(model: PreTrainedModel) -> KVLayout:
    """Hosts a copy of a model without the user's hooks, compares it with the model, and returns the layout.
    Raises UnsupportedModelError if the hosted copy fails, or computes something else than the model."""
    copy, name = copy_without_hooks(model), type(model).__name__
    stored_model.set_int8(copy, False)
    external.replace_by_random_products(copy)
    positions.patch_position_ids(copy)
    mixers.patch_mixers(copy)
    generator = torch.Generator().manual_seed(0)
    implementation = decoder_config(copy)._attn_implementation
    vocab_size = stored.weight_shape(copy.get_input_embeddings())[0]
    # quiet() hides transformers' advice to install GPU kernels, which it also gives on a CPU.
    with _short_windows(copy) as has_windows, quiet() if copy.device.type == "cpu" else nullcontext():
        for _ in range(_MAX_TRIALS):
            token_ids = torch.randint(vocab_size, (_NUM_TOKENS,), generator=generator, device="cpu").tolist()
            hosting.set_attention(copy, implementation)
            try:
                expected = _model_logits(copy, token_ids, bool(mixers.find_mixers(copy)))
            except Exception as error:  # the model's own code may raise any type
                raise UnsupportedModelError(f"{name} computes no text by itself: {reason_of(error)}.") from error
            hosting.set_attention(copy)
            try:
                layout = _trace_layout(copy, token_ids)
                agrees = _logits_agree(_hosted_logits(copy, layout, token_ids), expected)
            except LongdraftError:
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"{name} computes attention with code of its own, so longdraft cannot host it "
                    f"({reason_of(error)}): decode it with its own generate."
                ) from error
            if agrees:
                break
        else:
            raise UnsupportedModelError(
                f"{name} computes something else than attention to the text before each token (a bias, a mask of "
                "its own), so longdraft cannot host it exactly: decode it with its own generate."
            )
    return _trace_layout(copy, token_ids) if has_windows else layout


@contextmanager
def _short_windows(copy: PreTrainedModel) -> Iterator[bool]:
    """Shortens windows and chunks inside the ``with``, so that they slide. Yields True if the model has any."""
    modules = [module for module in copy.modules() if not isinstance(module, PreTrainedModel)]
    shortened: list[tuple[Any, str, int]] = []
    for owner in (decoder_config(copy), *modules):
        for name in _WINDOW_SETTINGS:
            size = vars(owner).get(name)
            if isinstance(size, int) and size > _SHORT_WINDOW:
                setattr(owner, name, _SHORT_WINDOW)
                shortened.append((owner, name, size))
    try:
        yield bool(shortened)
    finally:
        for owner, name, size in shortened:
            setattr(owner, name, size)


@torch.inference_mode()
def _model_logits(copy: PreTrainedModel, token_ids: list[int], is_stepwise: bool) -> torch.Tensor:
    """Returns logits (3, vocabulary) of the tree's nodes, from the model's own forward of each path.
    ``is_stepwise``: True computes the tokens after the prefix one by one, with the model's cache."""
    logits, takes_positions = [], takes_argument(copy, "position_ids")

    def forward(input_ids: torch.Tensor, start: int, **kwargs: Any) -> Any:
        # ``generate`` passes positions too. Without them some models number tokens differently.
        position_ids = {"position_ids": _position_ids(input_ids) + start} if takes_positions else {}
        return copy(input_ids=input_ids, **position_ids, **kwargs)

    for path in _TREE_PATHS:
        input_ids = to_device([token_ids[:_PREFIX_LEN] + [token_ids[_PREFIX_LEN + i] for i in path]], copy.device)
        if not is_stepwise:
            logits.append(forward(input_ids, 0, use_cache=False).logits[0, -len(path) :])
            continue
        # Some recurrent layers compute a single token, as in ``generate``, in another way than several tokens.
        out = forward(input_ids[:, :_PREFIX_LEN], 0, use_cache=True)
        for i in range(_PREFIX_LEN, input_ids.shape[1]):
            name = next(name for name in CACHE_NAMES if out.get(name) is not None)
            out = forward(input_ids[:, i : i + 1], i, use_cache=True, **{name: out[name]})
            logits.append(out.logits[0])
    return torch.cat(logits)


@torch.inference_mode()
def _hosted_logits(copy: PreTrainedModel, layout: KVLayout, token_ids: list[int]) -> torch.Tensor:
    """Returns the logits of :func:`_model_logits`, computed with our attention and our store."""
    store = _new_store(copy, layout, slots=1)
    for chunk in (token_ids[:_CHUNK_LEN], token_ids[_CHUNK_LEN:_PREFIX_LEN]):  # as a long prompt is prefilled
        prefill = store.make_forward_batch([0], [chunk], is_prefill=True)
        hosting.run(decoder_of(copy), hosting.ForwardContext(store, prefill, attend, layout))
        store.commit(0, range(len(chunk)))
    mask = torch.tensor([_TREE_MASK], dtype=torch.bool, device="cpu")
    batch = store.make_forward_batch([0], [token_ids[_PREFIX_LEN:]], depths=[_DEPTHS], mask=mask)
    logits: torch.Tensor = hosting.run(copy, hosting.ForwardContext(store, batch, attend, layout)).logits
    return logits[0]


@torch.inference_mode()
def _trace_layout(copy: PreTrainedModel, token_ids: list[int]) -> KVLayout:
    """Builds the layout from a traced forward of two tokens."""
    input_ids, trace = to_device([token_ids[:2]], copy.device), AttentionTrace()
    with hosting.forward_scope(trace):
        copy(input_ids=input_ids, position_ids=_position_ids(input_ids), use_cache=False)
    calls, shapes = tuple(trace.calls), mixers.recurrent_shapes(trace)
    if not (calls or shapes):
        raise UnsupportedModelError(
            f"{type(copy).__name__} does not go through transformers' attention interface, so longdraft cannot host "
            "it: decode it with its own generate."
        )
    return build_layout(copy, calls, shapes)


def _position_ids(input_ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None]


def _logits_agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the logits of all tokens agree up to rounding; in 16 bits, if the logits of most tokens agree."""
    # NaN logits (of a damaged model) pass, because decoding reports them.
    if actual.shape != expected.shape or bool(torch.isnan(expected).any()):
        return actual.shape == expected.shape
    differences = (actual.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    if actual.element_size() == 2:
        return bool(differences.median() < _HALF_LOGITS_TOLERANCE)
    return bool((differences < _TOLERANCE).all())
