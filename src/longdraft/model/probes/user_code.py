"""Tests whether a model that runs a user's code can verify drafts."""

from __future__ import annotations

import torch

from longdraft.errors import reason_of
from longdraft.model.called_functions import user_code_in
from longdraft.model.runner import TargetRunner

# reason_against_drafts compares the logits of _NUM_COMPARED tokens behind a prefix, when each token has its own forward
# and when one forward has _FORWARD_LENGTHS tokens: few and many tokens may run different kernels.
_PREFIX_LEN, _NUM_COMPARED, _FORWARD_LENGTHS = 5, 2, (2, 64)
# Largest relative difference of a token's logits that counts as rounding, in 16 bits and in float32.
_HALF_TOLERANCE, _TOLERANCE = 2e-2, 1e-5


def reason_against_drafts(runner: TargetRunner) -> str | None:
    """Returns the reason why a model with a user's hooks, forwards or layers cannot verify drafts; None if it can.
    Compares the logits of made-up tokens in forwards of one and of several tokens."""
    with runner.lock:
        runner.sync_with_model()
        if not (names := user_code_in(runner.model, include_classes=True)):
            return None
        why = "this code gives a token another result beside other tokens"
        try:
            single = _logits_in_steps(runner, [1] * _NUM_COMPARED)
            together = [_logits_in_steps(runner, [n]) for n in _FORWARD_LENGTHS]
            norms = single.float().norm(dim=-1)
            differences = [((logits - single).float().norm(dim=-1) / norms).max() for logits in together]
            if bool(torch.stack(differences).max() <= (_HALF_TOLERANCE if single.element_size() == 2 else _TOLERANCE)):
                return None
        except Exception as error:  # a user's code can raise any type
            why = f"this code fails for several tokens ({reason_of(error)})"
    return (
        f"{type(runner.model).__name__} has code of your own in {', '.join(dict.fromkeys(names))}, and a forward "
        f"verifies several tokens of a draft: {why}. Remove the code, or take the method ar, which drafts nothing."
    )


def _logits_in_steps(runner: TargetRunner, lengths: list[int]) -> torch.Tensor:
    """Returns logits (_NUM_COMPARED, vocabulary) of the first tokens after a prefix, in forwards of these lengths."""
    store, logits = runner.new_store(1, _PREFIX_LEN + sum(lengths)), []
    # Token ids that look random, but are the same for all lengths.
    token_ids = [(37 * i + 11) % runner.vocab_size for i in range(_PREFIX_LEN + sum(lengths))]
    runner.forward(store.make_forward_batch([0], [token_ids[:_PREFIX_LEN]], is_prefill=True), store, logits="none")
    store.commit(0, range(_PREFIX_LEN))
    for length in lengths:
        start = store.lengths[0]
        out = runner.verify(store.make_forward_batch([0], [token_ids[start : start + length]]), store)
        assert out.logits is not None
        logits.append(out.logits[0].clone())
        store.commit(0, range(length))
    return torch.cat(logits)[:_NUM_COMPARED]
