"""Prompts read in windows: which tokens are seen, kernels against masks, methods against plain decoding."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator
from longdraft.attention import cpu, sdpa
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.prefill_window import NUM_FIRST, NUM_LAST, with_prefill_window
from longdraft.errors import CapabilityError, RequestError
from tests.support.simulated_gpu import to_simulated_gpu
from tests.support.tiny import tiny_model

WINDOW = 200
PROMPT = torch.randint(60, (1400,), generator=torch.Generator().manual_seed(3)).tolist()


def chunk(prefix: int, size: int, prompt_len: int, window: int = WINDOW) -> ForwardBatch:
    batch = ForwardBatch.make([0], [prefix], size, is_prefill=True, prompt_len=prompt_len)
    return with_prefill_window(batch, window)


def test_tokens_see_the_first_tokens_and_a_window_and_the_last_tokens_see_all():
    prompt_len = 1500
    mask = chunk(300, 800, prompt_len).full_mask(0, torch.device("cpu"))
    for row in range(800):
        position = 300 + row
        seen = set(mask[row].nonzero()[:, 0].tolist())
        expected = {*range(NUM_FIRST), *range(max(0, position - WINDOW + 1), position + 1)}
        assert seen == (set(range(position + 1)) if position >= prompt_len - NUM_LAST else expected)


def test_a_prompt_that_sees_everything_anyway_is_read_as_ever():
    batch = ForwardBatch.make([0], [0], NUM_FIRST + WINDOW - 1, is_prefill=True, prompt_len=5000)
    assert with_prefill_window(batch, WINDOW) is batch
    tail = ForwardBatch.make([0], [4600], 300, is_prefill=True, prompt_len=4900)
    assert with_prefill_window(tail, WINDOW) is tail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("prefix", "size"), [(0, 1024), (1024, 300), (700, 97)])
def test_the_kernels_see_what_the_mask_shows(prefix, size, dtype):
    g = torch.Generator().manual_seed(size)
    q = torch.randn(1, 4, size, 32, generator=g)
    keys, values = (torch.randn(1, 2, prefix + size, 32, generator=g).to(dtype) for _ in "kv")
    keys = keys.transpose(2, 3).contiguous().transpose(2, 3)  # as they are stored
    batch = chunk(prefix, size, prompt_len=5000)
    assert batch.num_first
    found, expected = (module.attend(q, keys, values, batch, 0.2) for module in (cpu, sdpa))
    step = 1e-5 if dtype == torch.float32 else 2e-2  # with tiles the weights are rounded too
    torch.testing.assert_close(found, expected, rtol=step, atol=step)
    # A token has the same bits in a smaller chunk.
    later = chunk(prefix + 1, size - 1, prompt_len=5000)
    if later.query_len > cpu.MAX_FOLDED_QUERY_LEN:
        assert torch.equal(cpu.attend(q[:, :, 1:], keys, values, later, 0.2), found[:, :, 1:])


def test_methods_write_what_plain_decoding_writes_behind_such_a_prompt():
    model = tiny_model(context=4096)
    settings = {"max_new_tokens": 24, "eos_token_ids": []}
    prompts = [PROMPT, PROMPT[:300], [3, 9, 4, 7] * 300]
    exact = Speculator("ar", target=model)
    plain = Speculator("ar", target=model, prefill_window=128)
    lookup = Speculator("prompt-lookup", target=model, prefill_window=128, plan="fixed", min_n=1)
    expected = plain.generate(prompts, **settings)
    found = lookup.generate(prompts, **settings)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert 0 < sum(r.accepted for r in found) < sum(r.drafted for r in found)
    assert not any(r.exact for r in expected + found) and not plain.exact and exact.exact
    assert plain.runner().fingerprint != exact.runner().fingerprint
    reference = exact.generate(prompts, **settings)
    assert expected[1].token_ids == reference[1].token_ids and expected[0].token_ids != reference[0].token_ids
    alone = [plain.generate([prompt], **settings)[0].token_ids for prompt in prompts]
    assert alone == [r.token_ids for r in expected]


def test_unusable_windows_are_refused(simulated_gpu):
    with pytest.raises(RequestError, match="prefill_window"):
        Speculator("ar", prefill_window=5)
    with pytest.raises(CapabilityError, match="prefill_window"):
        Speculator("ar", target=to_simulated_gpu(tiny_model()), prefill_window=256)
