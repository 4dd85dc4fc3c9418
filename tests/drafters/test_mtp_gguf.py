"""Layers that predict further tokens in GGUF files: the weights that they stand for, and exact as a draft."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator, load
from longdraft.drafts import mtp_formats
from longdraft.drafts.mtp_formats import read
from longdraft.errors import CheckpointError
from longdraft.native import QuantizedMatrix, kernels
from tests.support.gguf_architectures import write
from tests.support.slow_marks import slow_except

pytest.importorskip("gguf")
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
}
# Architecture -> options of a model one layer deeper, whose last layer is the further one.
DEEPER = {"qwen35": DELTA, "qwen35moe": DELTA, "qwen3next": DELTA, "glm4moe": {}}
# These files have 1 + the weight of a norm.
ONE_MORE = ("qwen35", "qwen35moe", "qwen3next")


def written(file, architecture, kind="Q8_0"):
    """A file with a further layer, and what the layer's tensors stand for."""
    generator = torch.Generator().manual_seed(1)
    own = {
        "eh_proj.weight": 0.2 * torch.randn(64, 128, generator=generator),
        **{f"{name}.weight": 0.2 * torch.randn(64, generator=generator) for name in ("enorm", "hnorm", "norm")},
    }
    more = float(architecture in ONE_MORE)
    names = {"norm.weight": "shared_head_norm.weight"}
    beside = {f"blk.4.nextn.{names.get(n, n)}": t if t.dim() > 1 else t + more for n, t in own.items()}
    fields = {"nextn_predict_layers": 1}
    model = write(file, architecture, kind, fields=fields, beside=beside, num_hidden_layers=5, **DEEPER[architecture])
    return own | {f"layer.{n}": t for n, t in model.model.layers[4].state_dict().items()}


@pytest.mark.parametrize("architecture", DEEPER)
def test_the_weights_are_those_that_the_file_stands_for(tmp_path, architecture):
    expected = written(tmp_path / "a.gguf", architecture)
    assert mtp_formats.has_mtp_layer(tmp_path / "a.gguf")
    found = read(tmp_path / "a.gguf")
    assert isinstance(found["eh_proj.weight"], QuantizedMatrix) and isinstance(
        found["layer.self_attn.q_proj.weight"], QuantizedMatrix
    )
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        given = found[name]
        torch.testing.assert_close(
            given.dequantize() if isinstance(given, QuantizedMatrix) else given, weight, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("architecture", slow_except(DEEPER, ["qwen35", "glm4moe"]))
def test_a_file_drafts_for_itself(tmp_path, architecture):
    written(tmp_path / "a.gguf", architecture)
    prompt = (torch.arange(40) * 7 % 61 + 1).tolist()
    arithmetic = "int8" if kernels() is not None and architecture.startswith("qwen") else "float32"
    model, tokenizer = load(tmp_path / "a.gguf", device="cpu", arithmetic=arithmetic)
    plain, drafted = (
        Speculator(method, target=model, tokenizer=tokenizer, plan="fixed").generate(
            [prompt], max_new_tokens=12, eos_token_ids=[]
        )[0]
        for method in ("ar", "mtp")
    )
    assert plain.token_ids == drafted.token_ids and drafted.drafted > 0


def test_files_without_one_say_so(tmp_path):
    write(tmp_path / "a.gguf", "qwen35")
    assert not mtp_formats.has_mtp_layer(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="no multi-token prediction layer"):
        read(tmp_path / "a.gguf")
