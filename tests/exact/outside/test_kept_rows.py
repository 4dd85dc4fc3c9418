"""Kept rows are of the weights and settings that decode now, whatever changed them and whoever kept them."""

from __future__ import annotations

import copy
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import longdraft
from longdraft import PromptCache, Speculator
from longdraft.errors import CheckpointError
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_model

PROMPT = [3, 9, 14, 7, 22, 5] * 6
Change = Callable[[Any], Any]


def model(seed: int = 0) -> Any:
    return tiny_model(layers=4, seed=seed)


def in_place(m: Any) -> None:
    with torch.no_grad():
        m.model.layers[2].mlp.down_proj.weight.mul_(1.5)


def one_number(m: Any) -> None:
    with torch.no_grad():
        m.model.layers[1].self_attn.k_proj.weight[5, 7] += 4.0


def one_row_of_data(m: Any) -> None:
    m.model.layers[0].self_attn.v_proj.weight.data[3] += 4.0


def a_token_of_data(m: Any) -> None:
    m.model.embed_tokens.weight.data[9] *= -1


def norm_of_data(m: Any) -> None:
    m.model.layers[1].input_layernorm.weight.data[0] += 1.0


def by_numpy(m: Any) -> None:
    m.model.layers[1].mlp.up_proj.weight.detach().numpy()[...] *= 1.5


def loaded(m: Any) -> None:
    m.load_state_dict(model(seed=1).state_dict())


def assigned(m: Any) -> None:
    m.load_state_dict(model(seed=1).state_dict(), assign=True)


def new_parameter(m: Any) -> None:
    m.model.layers[3].self_attn.o_proj.weight = torch.nn.Parameter(m.model.layers[3].self_attn.o_proj.weight * 1.5)


def merged(m: Any) -> None:
    """As packages for LoRA merge."""
    layer = m.model.layers[1].self_attn.q_proj
    layer.weight.data = layer.weight.data + torch.outer(torch.ones(layer.out_features), torch.ones(layer.in_features))


def epsilon(m: Any) -> None:
    m.model.layers[0].input_layernorm.variance_epsilon = 0.5


def scaling(m: Any) -> None:
    m.model.layers[0].self_attn.scaling *= 2


def hook(m: Any) -> None:
    m.model.layers[0].register_forward_hook(lambda module, inputs, out: out * 1.1)


def a_buffer(m: Any) -> None:
    m.model.rotary_emb.inv_freq = m.model.rotary_emb.inv_freq * 0.5


def a_forward(m: Any) -> None:
    m.model.norm.forward = lambda x: x * 0.5


class Adapted(torch.nn.Module):
    """As adapters are: a layer around a layer."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner, self.enabled = inner, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (3 if self.enabled else 1)


def adapter(m: Any) -> None:
    m.model.layers[1].mlp.up_proj = Adapted(m.model.layers[1].mlp.up_proj)


def adapter_off(m: Any) -> None:
    """Of a model that had one when its rows were kept."""
    m.model.layers[1].mlp.up_proj.enabled = False


def other(m: Any) -> Any:
    return model(seed=1)


CHANGES: tuple[Change, ...] = (
    in_place, one_number, one_row_of_data, a_token_of_data, norm_of_data, by_numpy, loaded, assigned, new_parameter,
    merged, epsilon, scaling, hook, a_buffer, a_forward, adapter, adapter_off, other,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("where", ["cache", "tree", "session", "snapshot"])
def test_a_changed_model_computes_its_rows_anew(tmp_path: Path, where: str, change: Change) -> None:
    first = model()
    if change is adapter_off:
        adapter(first)
    spec = Speculator("prompt-lookup", target=first, min_n=1, plan="fixed")
    cache = PromptCache(tree_bytes=1 << 20 if where == "tree" else 0)
    session = spec.session(batch=1, cache=None)
    if where == "session":
        session.add(longdraft.Request(PROMPT, max_new_tokens=8))
        while session.busy:
            session.step()
    else:
        before = spec.generate([PROMPT], max_new_tokens=8, cache=cache)[0]
        again = spec.generate([PROMPT + before.token_ids], max_new_tokens=8, cache=cache)[0]
        assert again.cached_tokens >= len(PROMPT)
        if where == "tree":
            spec.generate([[1, 2] * 60], max_new_tokens=1, cache=cache)
        if where == "snapshot":
            cache.save(tmp_path / "rows", spec.runner().fingerprint)
    changed = change(first) or first
    if changed is not first:
        if where == "session":
            return
        spec = Speculator("prompt-lookup", target=changed, min_n=1, plan="fixed")
    expected = Speculator("ar", target=copy.deepcopy(changed)).generate([PROMPT], max_new_tokens=24)[0]
    if where == "session":
        number = session.add(longdraft.Request(PROMPT, max_new_tokens=24))
        while session.busy:
            session.step()
        result = session.result(number)
    elif where == "snapshot":
        with pytest.raises(CheckpointError):
            restored = PromptCache.restored(tmp_path / "rows", spec.runner().fingerprint)
            spec.generate([PROMPT], max_new_tokens=24, cache=restored)
        return
    else:
        result = spec.generate([PROMPT], max_new_tokens=24, cache=cache)[0]
    assert result.token_ids == expected.token_ids
    assert result.cached_tokens == 0
    assert result.drafted > result.accepted


def test_an_equal_model_goes_on_with_the_rows(tmp_path: Path) -> None:
    """Loaded again, moved to another folder, or copied."""
    model().save_pretrained(tmp_path / "a")
    model().save_pretrained(tmp_path / "b")
    cache, kind = PromptCache(), type(model())
    found = []
    for m in (kind.from_pretrained(tmp_path / "a"), kind.from_pretrained(tmp_path / "b"), copy.deepcopy(model())):
        spec = Speculator("ar", target=m.train(bool(found)))
        found.append(spec.generate([PROMPT], max_new_tokens=8, cache=cache)[0])
    assert [r.cached_tokens > 0 for r in found] == [False, True, True]
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids


def test_a_hook_that_changes_its_mind_keeps_nothing() -> None:
    m, strength = model(), [1.1]
    m.model.layers[0].register_forward_hook(lambda module, inputs, out: out * strength[0])
    spec, cache = Speculator("ar", target=m), PromptCache()
    spec.generate([PROMPT], max_new_tokens=8, cache=cache)
    strength[0] = 0.5
    result = spec.generate([PROMPT], max_new_tokens=24, cache=cache)[0]
    assert result.cached_tokens == 0
    assert result.token_ids == Speculator("ar", target=m).generate([PROMPT], max_new_tokens=24)[0].token_ids


@pytest.mark.parametrize("part", ["attn_k", "attn_v", "ffn_down", "attn_norm", "epsilon"])
@pytest.mark.parametrize("weights", ["stored", "float32"])
def test_files_that_differ_in_one_part_have_two_names(tmp_path: Path, part: str, weights: Any) -> None:
    gguf = pytest.importorskip("gguf")
    names = []
    for i, path in enumerate((tmp_path / "a.gguf", tmp_path / "b.gguf")):
        write_gguf(path)
        content = bytearray(path.read_bytes())
        if i and part == "epsilon":
            key = b"llama.attention.layer_norm_rms_epsilon"
            place = content.index(key) + len(key) + 4
            content[place : place + 4] = struct.pack("<f", 1e-3)
        elif i:
            (offset,) = [t.data_offset for t in gguf.GGUFReader(path).tensors if t.name == f"blk.1.{part}.weight"]
            content[int(offset) + 37] ^= 1
        path.write_bytes(content)
        loaded, _ = longdraft.load(path, weights=weights)
        names.append(Speculator("ar", target=loaded).runner().fingerprint)
    assert names[0] != names[1]


def test_a_look_takes_milliseconds() -> None:
    m, _ = longdraft.load()
    spec, cache = Speculator("ar", target=m), PromptCache()
    spec.generate([PROMPT], max_new_tokens=1, cache=cache)
    times = []
    for _ in range(5):
        start = time.process_time()
        spec.runner().synced_fingerprint()
        times.append(time.process_time() - start)
    assert min(times) < 0.15  # of a busy machine; 15 ms of a quiet one
