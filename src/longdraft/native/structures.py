"""Builds the structures of kernels.h for decoder layers (``struct``) from tensors, and keeps the tensors alive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from longdraft.native.boundary import address
from longdraft.native.header import CONSTANTS, ELEMENTS, ENUMS, STRUCTURES, Int64
from longdraft.native.quantized_kv import KV_DTYPE_IDS, Int4KV, Int8KV, KVTensor
from longdraft.native.quantized_matrix import QuantizedMatrix

# A linear layer: its weight (out, in), float32 or quantized, and its bias (out,) or None.
LinearWeights = tuple[torch.Tensor | QuantizedMatrix, torch.Tensor | None]
Transform = Callable[[LinearWeights], LinearWeights]

Matrix, SoftmaxParams, KVCache = (STRUCTURES[name] for name in ("Matrix", "SoftmaxParams", "KVCache"))

# ctype of what a pointer points to -> dtype of a tensor for it.
_DTYPES = {
    ctypes.c_float: torch.float32, ctypes.c_uint8: torch.bool, ctypes.c_int32: torch.int32, Int64: torch.long,
}  # fmt: skip


def make_struct(name: str, **fields: Any) -> ctypes.Structure:
    """Returns a structure of kernels.h, and keeps alive what its fields point to. Fields that are left out are 0.

    Pointers take None, an address, a sequence of numbers or addresses, or a tensor, whose dtype and layout are checked.
    """
    elements, keepalive = ELEMENTS[name], list[Any]()
    assert fields.keys() <= elements.keys(), f"{name} has no {fields.keys() - elements.keys()}"
    for field_name, value in fields.items():
        if isinstance(value, torch.Tensor):
            fields[field_name] = address(value, _DTYPES[elements[field_name]])
            keepalive.append(value)
        elif isinstance(value, Sequence):
            array = (elements[field_name] * len(value))(*value)
            fields[field_name] = ctypes.addressof(array)
            keepalive.append(array)
    struct = STRUCTURES[name](**fields)
    struct.keepalive = keepalive
    return struct


def matrix_struct(
    weights: LinearWeights, out: torch.Tensor | None = None, in_features: int | None = None
) -> ctypes.Structure:
    """Returns the structure Matrix of a linear layer. out: memory for its outputs; None: C++ sets it. in_features: the
    number of features that the weight must have; None: not checked."""
    w, bias = weights
    if in_features not in (None, w.shape[1]):
        raise TypeError(f"inputs of {in_features} features do not fit a weight (out, in) = {tuple(w.shape)}")
    if isinstance(w, QuantizedMatrix):
        format_id, (data, stride, int8_layout) = w.format_id, w.kernel_address()
    else:
        format_id = ENUMS["Format"]["FLOAT32"]
        data, stride, int8_layout = address(w, strided_rows=True), w.stride(0) * w.itemsize, 0
    return Matrix(
        w=data, bias=address(bias, min_numel=w.shape[0]), y=address(out), w_stride=stride, n_out=w.shape[0],
        format=format_id, int8_layout=int8_layout,
    )  # fmt: skip


def kv_struct(keys: KVTensor, values: KVTensor) -> ctypes.Structure:
    """Returns the structure KVCache of keys and values (layers, slots, num_kv_heads, capacity, head_dim), of a dtype in
    :data:`KV_DTYPE_IDS`."""
    struct = KVCache(dtype=KV_DTYPE_IDS[keys.dtype])
    if keys.shape != values.shape:
        raise TypeError(f"values must be shaped like keys {keys.shape}; got {values.shape}")
    if isinstance(keys, Int8KV) and isinstance(values, Int8KV):
        struct.k_scale, struct.v_scale = (address(x.scales, strided_rows=True) for x in (keys, values))
        struct.scale_layer_stride, struct.scale_slot_stride, struct.scale_head_stride, _ = keys.scales.stride()
        keys, values = keys.quants, values.quants
    elif isinstance(keys, Int4KV) and isinstance(values, Int4KV):
        keys, values = keys.data, values.data
    assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
    k, v = keys.stride(), values.stride()
    if v[4] != 1 and values is not keys:
        raise TypeError(f"values must be contiguous; got strides {v}")
    rows = [x if x.stride(4) == 1 else x.mT for x in (keys, values)]
    struct.k, struct.v = (address(x, keys.dtype, strided_rows=True) for x in rows)
    struct.k_layer_stride, struct.k_slot_stride, struct.k_head_stride, struct.k_row_stride, struct.k_dim_stride = k
    struct.v_layer_stride, struct.v_slot_stride, struct.v_head_stride, struct.v_row_stride, _ = v
    return struct


# Prompts of more tokens than this use longdraft_attend_prefill.
FEW_TOKENS = CONSTANTS["FEW_TOKENS"]

# Weight and epsilon of an RMS norm.
Norm = tuple[torch.Tensor, float]
Layer = TypeVar("Layer", bound="StackLayer")


def weight_fields(
    norms: Mapping[str, Norm], names: Sequence[str], projections: Sequence[LinearWeights], **sizes: int
) -> dict[str, Any]:
    """Returns fields of a layer's structure: of norms (mlp_norm, mlp_eps, ...), and of projections.

    Args:
        norms: name -> weight and epsilon.
        names: names of the projections.
        projections: linear layers.
        sizes: sizes of norms that are not (hidden_size,).
    """
    fields: dict[str, Any] = dict(zip(names, map(matrix_struct, projections), strict=True))
    for name, (weight, eps) in norms.items():
        fields[name] = address(weight, min_numel=sizes.get(name, norms["norm"][0].shape[0]))
        fields[name.replace("norm", "eps")] = eps
    return fields


class HasStruct(Protocol):
    """An object that has a ctypes structure, and keeps alive the memory that the structure points to."""

    struct: ctypes.Structure


@dataclass(eq=False)
class StackLayer:
    """A layer of a :class:`DecoderStack`.

    Attributes:
        is_recurrent: True: the layer has a recurrent state instead of a KV cache.
        norms: name -> weight and epsilon.
        projections: the linear layers, in the order that the subclass describes.
        struct: the layer's structure in kernels.h, which points to the memory of norms and projections.
    """

    is_recurrent: ClassVar[bool]
    norms: Mapping[str, Norm]
    projections: Sequence[LinearWeights]
    struct: ctypes.Structure = field(init=False)

    @property
    def hidden_size(self) -> int:
        """Size of the residual stream."""
        return self.norms["norm"][0].shape[0]

    def map_weights(self: Layer, transform: Transform) -> Layer:
        """Returns a copy of the layer, with ``transform`` applied to each projection."""
        return replace(self, projections=[transform(weights) for weights in self.projections])


@dataclass(eq=False)
class DecoderLayer(StackLayer):
    """A decoder layer like Llama's: RMS norm, attention with RoPE, RMS norm, gated MLP. Layers like Gemma's have
    additional norms after the attention and the MLP.

    Attributes:
        norms: before the attention "norm" and before the MLP "mlp_norm" (hidden_size,); optional: after them
            "post_attn_norm" and "post_mlp_norm"; for each head's queries and keys "q_norm" and "k_norm" (head_dim,).
        projections: q, k, v, o, gate, up, down. If q has 2 * num_heads * head_dim outputs, the second half of a head's
            outputs is a gate, whose sigmoid multiplies the attention's output.
        num_heads, num_kv_heads, head_dim: number of query heads; of KV heads; size of a head, a multiple of 16.
        scale, softcap, sinks: as in :meth:`Kernels.attend`; sinks (num_heads,).
        gelu: True: the MLP's activation is GELU by tanh; False: SiLU.
        norm_weight_offset: added to the norms' weights; 1 for Gemma.
    """

    is_recurrent = False
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    gelu: bool = False
    norm_weight_offset: float = 0.0

    def __post_init__(self) -> None:
        d, names = self.head_dim, ("q", "k", "v", "o", "gate", "up", "down")
        fields = weight_fields(self.norms, names, self.projections, q_norm=d, k_norm=d)
        self.sinks = None if self.sinks is None else self.sinks.detach().float().contiguous()
        self.struct = make_struct(
            "DecoderLayer", **fields, norm_offset=self.norm_weight_offset,
            softmax=SoftmaxParams(self.scale, self.softcap or 0.0, address(self.sinks, min_numel=self.num_heads)),
            hidden_size=self.hidden_size, n_heads=self.num_heads, n_kv_heads=self.num_kv_heads, d=d,
            intermediate_size=fields["gate"].n_out, gelu=self.gelu,
            gated_attn=fields["q"].n_out == 2 * self.num_heads * d,
        )  # fmt: skip


@dataclass(eq=False)
class DecoderStack:
    """Consecutive decoder layers, optionally with the final norm and the LM head.

    Attributes:
        norm, head: the final norm and the LM head; None: the stack has none.
        kv_group_ids: id of each layer's KV group. Layers of a group share metadata and a KV cache, as in vLLM. None:
            all layers are in one group.
        index_in_group: index of each layer in its group's KV cache; of a recurrent layer, among the recurrent ones.
            None: the index in ``layers``.
        softcap: replaces logits x by softcap * tanh(x / softcap); None: no cap.
        norm_weight_offset: added to the final norm's weight; 1 for Gemma.
    """

    layers: Sequence[StackLayer]
    norm: Norm | None = None
    head: LinearWeights | None = None
    kv_group_ids: Sequence[int] | None = None
    index_in_group: Sequence[int] | None = None
    softcap: float | None = None
    norm_weight_offset: float = 0.0

    def __post_init__(self) -> None:
        num_layers, hidden_size = len(self.layers), self.layers[0].hidden_size
        weight, eps = self.norm or (None, 0.0)
        self.struct = make_struct(
            "DecoderStack",
            layers=[None if x.is_recurrent else ctypes.addressof(x.struct) for x in self.layers],
            delta_layers=[ctypes.addressof(x.struct) if x.is_recurrent else None for x in self.layers],
            kv_group=self.kv_group_ids or [0] * num_layers, index_in_group=self.index_in_group or range(num_layers),
            n_layers=num_layers, hidden_size=hidden_size, norm=address(weight, min_numel=hidden_size), eps=eps,
            norm_offset=self.norm_weight_offset, softcap=self.softcap or 0.0,
            head=Matrix() if self.head is None else matrix_struct(self.head),
        )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """Number of outputs of the head; 0 without a head."""
        return 0 if self.head is None else self.head[0].shape[0]

    def map_weights(self, transform: Transform, head_transform: Transform | None = None) -> DecoderStack:
        """Returns a copy with ``transform`` applied to projections and head; head_transform: for the head instead."""
        head = None if self.head is None else (head_transform or transform)(self.head)
        return replace(self, layers=[layer.map_weights(transform) for layer in self.layers], head=head)


@dataclass(eq=False)
class AttentionMetadata:
    """Positions, slots, lengths and mask of a forward for one KV group: T new tokens in each of B sequences.

    Attributes:
        cos, sin: (B, T, rotary_dim); RoPE rotates the first rotary_dim dimensions of a head; rotary_dim may be 0.
        slots: slot of each sequence in the KV cache.
        kv_write_start: index of each sequence's first new KV entry.
        kv_lens: number of each sequence's KV entries, including new ones.
        mask: (B, T, width) bool, True where a token sees one of the last ``width`` entries; tokens see all entries
            before these. None: tokens see all entries.
        prefill: True: the tokens are a prompt's, with causal attention and no mask.
        window_start: (B, T) int32, as in :meth:`Kernels.attend`; None: no window.
        num_first: as in :meth:`Kernels.attend`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: Sequence[int]
    kv_write_start: Sequence[int]
    kv_lens: Sequence[int]
    mask: torch.Tensor | None
    prefill: bool = False
    window_start: torch.Tensor | None = None
    num_first: int = 0

    def __post_init__(self) -> None:
        num_sequences, query_len, rotary_dim = self.cos.shape
        if self.sin.shape != self.cos.shape:
            raise TypeError(f"cos and sin must have one shape, got {tuple(self.cos.shape)} and {tuple(self.sin.shape)}")
        self.struct = make_struct(
            "AttentionMetadata", n_sequences=num_sequences, query_len=query_len,
            cos=self.cos.contiguous(), sin=self.sin.contiguous(), rotary_dim=rotary_dim,
            slots=self.slots, kv_write_start=self.kv_write_start, kv_lens=self.kv_lens,
            masks=None if self.mask is None else self.mask.contiguous(),
            window_start=None if self.window_start is None else self.window_start.int().contiguous(),
            mask_width=0 if self.mask is None else self.mask.shape[-1], prefill=self.prefill, n_first=self.num_first,
        )  # fmt: skip
