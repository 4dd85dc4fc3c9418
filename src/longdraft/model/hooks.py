"""A user's own code in a model, such as hooks that steer it, rules drafts out where it looks at how many rows come."""

from __future__ import annotations

import torch

from longdraft.errors import reason_of
from longdraft.model.fingerprints import hooked
from longdraft.model.runner import TargetRunner

_TEXT, _STEPS, _SEVERAL = 5, 2, (2, 64)
# Largest relative difference of a row's logits, in 16 bits and in more.
_ROUNDED, _CLOSE = 2e-2, 1e-5


def against_drafts(runner: TargetRunner) -> str | None:
    """Runs a model with hooks, replaced forwards or layers of the user's on made-up tokens, row by row and several rows
    at once. Returns why it takes no drafts, with the name of a module; None if a row does not depend on the others.
    """
    with runner.lock:
        runner.refresh()
        if not (names := hooked(runner.model, classes=True)):
            return None
        why = "it gives a row another result if several come at once"
        try:
            alone, *others = (_rows(runner, sizes) for sizes in ([1] * _STEPS, *([n] for n in _SEVERAL)))
            most = _ROUNDED if alone.element_size() == 2 else _CLOSE
            apart = [((each - alone).float().norm(dim=-1) / alone.float().norm(dim=-1)).max() for each in others]
            if bool(torch.stack(apart).max() <= most):
                return None
        except Exception as error:  # a user's code can raise any type
            why = f"with several rows it fails ({reason_of(error)})"
    return (
        f"{type(runner.model).__name__} has code of its user's in {', '.join(dict.fromkeys(names))}, and drafts are "
        f"verified several rows at a time: {why}. Remove it, or decode plainly, with the method ar."
    )


def _rows(runner: TargetRunner, sizes: list[int]) -> torch.Tensor:
    """Logits (steps, vocabulary) of the rows behind a text, fed so many at a time."""
    store, found = runner.new_store(1, _TEXT + sum(sizes)), []
    tokens = [(37 * i + 11) % runner.vocab_size for i in range(_TEXT + sum(sizes))]
    runner.forward(store.block([0], [tokens[:_TEXT]], prompt=True), store, logits="none")
    store.commit(0, range(_TEXT))
    for size in sizes:
        start = store.lengths[0]
        out = runner.verify(store.block([0], [tokens[start : start + size]]), store)
        assert out.logits is not None
        found.append(out.logits[0].clone())
        store.commit(0, range(size))
    return torch.cat(found)[:_STEPS]
