"""Drafts in 8 and 4 bits: what they lose, that every kind loads them, and that damaged ones are refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft import Speculator
from longdraft.drafts import draft_folder, packed
from longdraft.drafts.kinds import kind_of
from longdraft.errors import CheckpointError
from longdraft.native.rounded import rounded
from tests.drafts import edit, random_draft, random_eagle3, random_heads, random_lm, random_onepass
from tests.tiny import tiny_model

MAKE = {
    "longspec": random_draft, "eagle3": random_eagle3, "onepass": random_onepass, "small-lm": random_lm,
    "heads": random_heads,
}  # fmt: skip
PROMPT = [[5, 6, 7, 5, 6, 7, 5]]


@pytest.mark.parametrize("bits", packed.BITS)
@pytest.mark.parametrize("kind", MAKE)
def test_every_kind_is_packed_and_read(kind, bits, tmp_path):
    model = tiny_model(layers=6)
    folder, out = MAKE[kind](tmp_path / "whole", model), tmp_path / "packed"
    whole = kind_of(folder).load(folder)
    whole.save(out, bits=bits)
    found = kind_of(out).load(out)
    assert found.config == whole.config and found.made_for == whole.made_for
    for name, weight in whole.weights.items():
        assert found.weights[name].shape == weight.shape
        assert (found.weights[name].float() - weight.float()).abs().max() <= weight.abs().max() / (
            150 if bits == 8 else 8
        )
    stored = load_file(out / "model.safetensors")
    assert any(t.dtype in (torch.int8, torch.uint8) for t in stored.values())
    assert (out / "model.safetensors").stat().st_size < (folder / "model.safetensors").stat().st_size
    expected = Speculator("ar", target=model).generate(PROMPT, max_new_tokens=12)[0].token_ids
    assert Speculator(out, target=model).generate(PROMPT, max_new_tokens=12)[0].token_ids == expected


def test_eight_bits_are_what_the_kernels_round_drafts_to(tmp_path):
    weight = torch.randn(50, 96).bfloat16()
    tensors = packed.packed({"a.weight": weight}, 8)
    back = packed.unpacked(tensors, tmp_path)["a.weight"]
    assert (tensors["a.weight"].dtype, tensors["a.weight.scales"].shape) == (torch.int8, (50, 1))
    # The scales, and with them every weight, to a last bit of float32.
    torch.testing.assert_close(rounded(back).floats(), rounded(weight).floats(), rtol=2e-7, atol=0)
    torch.testing.assert_close(back, rounded(weight).floats(), rtol=2e-7, atol=0)


def test_four_bits_have_a_scale_for_32_columns(tmp_path):
    weight = torch.arange(-8.0, 8.0).repeat(3, 6) * torch.tensor([0.5, 0.25, 2.0]).repeat_interleave(32)
    tensors = packed.packed({"a.weight": weight, "b.weight": torch.zeros(4, 64), "c.weight": torch.ones(2, 33)}, 4)
    assert (tensors["a.weight"].shape, tensors["a.weight.scales"].shape) == ((3, 48), (3, 3))
    assert tensors["a.weight"][0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert tensors["c.weight"].dtype == torch.int8  # no whole number of blocks
    back = packed.unpacked(tensors, tmp_path)
    assert torch.equal(back["a.weight"], weight) and torch.equal(back["b.weight"], torch.zeros(4, 64))


def test_bits_by_name(tmp_path):
    tensors = {"a.weight": torch.randn(4, 64), "b.weight": torch.randn(4, 64), "c.weight": torch.randn(4, 64)}
    found = packed.packed(tensors, {"a.weight": 8, "b.weight": 4})
    assert [found[n].dtype for n in tensors] == [torch.int8, torch.uint8, torch.float32]
    for bits, part in (({"d.weight": 8}, "d.weight"), (5, "5"), ({"a.weight": 3}, "3")):
        with pytest.raises(ValueError, match=part):
            packed.packed(tensors, bits)


def _without(name):
    return lambda t: {n: x for n, x in t.items() if n != name}


DAMAGE = {
    "no scales": _without("mlp.up_proj.weight.scales"),
    "no numbers": _without("mlp.up_proj.weight"),
    "scales of another matrix": lambda t: t | {"mlp.up_proj.weight.scales": torch.ones(3, 1)},
    "numbers of other bits": lambda t: t | {"mlp.up_proj.weight": t["mlp.up_proj.weight"].view(torch.uint8)},
    "scales of another dtype": lambda t: t | {"mlp.up_proj.weight.scales": t["mlp.up_proj.weight.scales"].half()},
    "scales that are not finite": lambda t: t | {"mlp.up_proj.weight.scales": t["mlp.up_proj.weight.scales"] / 0},
    "fewer rows": lambda t: {n: x[:-1].contiguous() if n.startswith("mlp.up_proj") else x for n, x in t.items()},
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_damaged_files_are_refused_by_name(problem, tmp_path):
    folder, out = random_draft(tmp_path / "whole", tiny_model()), tmp_path / "packed"
    kind_of(folder).load(folder).save(out, bits=8)
    save_file(DAMAGE[problem](load_file(out / "model.safetensors")), out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight"):
        kind_of(out).load(out)


def test_others_folders_are_left_as_they_are(tmp_path):
    folder = random_draft(tmp_path / "whole", tiny_model())
    edit(folder, longdraft_format="drop")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"odd": torch.zeros(2, dtype=torch.int8)}, folder / "model.safetensors")
    read = draft_folder.read_tensors(draft_folder.read_config(folder), folder)
    assert read["odd"].dtype == torch.int8
