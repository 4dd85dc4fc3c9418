"""Tiny models whose checkpoints have an MTP layer, in the published layouts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.recurrent_models import recurrent_model

_BASE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_NUMBERED = {"glm4_moe": {**_BASE, "use_qk_norm": True}, "deepseek_v3": {**_BASE, **_LATENT, "head_dim": 8}}
_EXPERTS = {"mlp_only_layers": []}
# Model types, and whether the MTP layer has experts.
SPARSE = {"qwen3_5_text": False, "qwen3_next": True, "qwen3_5_moe_text": True, "glm4_moe": True, "deepseek_v3": True}


def target(kind: str) -> PreTrainedModel:
    """A random model of a type."""
    if kind not in _NUMBERED:
        return recurrent_model(kind, **(_EXPERTS if kind == "qwen3_next" else {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_NUMBERED[kind]))
    _fill(model, 3)
    return model.eval()


class MTPLayer(nn.Module):
    """The definition of an MTP layer: a projection, then a layer of the model's class with eager attention."""

    def __init__(self, model: PreTrainedModel, sparse: bool) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        changes = {
            "layer_types": ["full_attention"],
            "mlp_only_layers": [] if sparse else [0],
            "first_k_dense_replace": 0,
        }
        for name, value in changes.items():
            if hasattr(config, name):
                setattr(config, name, value)
        inner = model.model
        norm = type(inner.norm)
        self.layer = type(inner.layers[-1])(config, 0)
        self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, f: torch.Tensor, cos_sin: Any, mask: torch.Tensor) -> torch.Tensor:
        """x, f (T, hidden) and an additive mask (T, T) -> (T, hidden)."""
        n = self.eh_proj(torch.cat([self.enorm(x), self.hnorm(f)], -1))[None]
        out = self.layer(n, attention_mask=mask[None, None], position_embeddings=cos_sin)
        return self.norm(out[0] if isinstance(out, tuple) else out).view(x.shape)


def _fill(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in (*module.named_parameters(), *module.named_buffers()):
            if weight.is_floating_point() and "inv_freq" not in name:
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(1 + 0.2 * noise if "norm" in name else (0.02 if "bias" in name else 0.25) * noise)


def save_with_mtp(
    folder: Path, kind: str, shards: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, MTPLayer]:
    """A model loaded from a folder with an MTP layer, and the layer's definition.

    Args:
        shards: minimum number of the checkpoint's files.
    """
    model = target(kind)
    mtp = mtp_definition(model)
    model, mtp = model.to(dtype), mtp.to(dtype)
    numbered, layers = kind in _NUMBERED, model.config.num_hidden_layers
    model.save_pretrained(folder, max_shard_size="100KB" if shards > 1 else "5GB")
    files = sorted(folder.glob("*.safetensors"))
    tensors = published_tensors(mtp, layers if numbered else None)
    if numbered:  # copies of the target's
        tensors[f"model.layers.{layers}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        tensors[f"model.layers.{layers}.shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(load_file(files[-1]) | tensors, files[-1], metadata={"format": "pt"})
    if len(files) > 1:
        index = folder / "model.safetensors.index.json"
        listed = json.loads(index.read_text())
        listed["weight_map"] |= dict.fromkeys(tensors, files[-1].name)
        index.write_text(json.dumps(listed))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), mtp.eval()


def mtp_definition(model: PreTrainedModel) -> MTPLayer:
    """The MTP layer of a model of these tests, with its weights."""
    mtp = MTPLayer(model, SPARSE[model.config.model_type])
    _fill(mtp, 7)
    return mtp.eval()


def published_tensors(mtp: MTPLayer, layer: int | None) -> dict[str, torch.Tensor]:
    """The tensors by their published names.

    Args:
        layer: number of the layer in GLM's and DeepSeek's layout; None for Qwen's.
    """
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
    if layer is not None:
        names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
    begin = "mtp." if layer is None else f"model.layers.{layer}."
    found: dict[str, torch.Tensor] = {}
    for name, tensor in mtp.state_dict().items():
        part, _, rest = name.partition(".")
        if part == "layer":
            own = f"layers.0.{rest}" if layer is None else rest
        else:
            own = f"{names[part]}.{rest}"
        path = begin + own
        if path.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = path.removesuffix("gate_up_proj") + str(i)
                found |= {f"{stem}.gate_proj.weight": gate.clone(), f"{stem}.up_proj.weight": up.clone()}
        elif path.endswith("experts.down_proj"):
            stem = path.removesuffix("down_proj")
            found |= {f"{stem}{i}.down_proj.weight": each.clone() for i, each in enumerate(tensor)}
        else:
            found[path] = tensor.clone().contiguous()
    return found
