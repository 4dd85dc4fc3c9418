"""Measures how likely the target finds a text that an approximation wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.engine.loop import PREFILL_CHUNK
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.runner import TargetRunner

# Rows of an answer whose logits are held at a time.
ROWS = 128


@torch.inference_mode()
def surprise(runner: TargetRunner, cache: PromptCache, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Mean -log p of an output's tokens behind its prompt, in nats, by exact forwards over all of the text.

    Args:
        cache: holds the prompt's KV or some of it, with room for the output; the output's stays in it.
    """
    text, first = [*prompt, *output[:-1]], len(prompt) - 1
    store = cache.open(runner.new_store, 1, len(text))
    cache.begin(0, prompt)
    total = 0.0
    try:
        while (done := store.lengths[0]) < len(text):
            end = min(done + PREFILL_CHUNK, first) if done < first else done + ROWS
            chunk = text[done:end]
            block = store.block([0], [chunk], prompt=done < first)
            out = runner.forward(block, store, logits="none" if done < first else "all")
            store.commit(0, range(len(chunk)))
            if out.logits is not None:
                said = torch.tensor(output[done - first : done - first + len(chunk)], device=out.logits.device)
                total -= float(out.logits[0].float().log_softmax(-1).gather(1, said[:, None]).sum())
    finally:
        cache.remember(0, text)
    return total / len(output)
