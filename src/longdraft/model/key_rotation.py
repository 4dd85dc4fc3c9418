"""Keys moved from one position to another: what a model's rotary embedding did to them is undone, and done anew.

A rotation by a position and one back by it cancel, so a key that was computed at any position can be kept without one
("before RoPE") and read at whatever position it shall stand. A factor that YaRN puts on cos and sin is no rotation: it
stays on the key through all of it.
"""

from __future__ import annotations

import torch

from longdraft.errors import UnsupportedModelError
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import rotary_module

# How far keys may be off that are the same but for rounding, as a part of the largest one.
_CLOSE = {4: 1e-3, 8: 1e-3, 2: 4e-2}
# Any position but 0 shows how keys turn.
_PROBED = 7


class KeyRotation:
    """Turns keys of a hosted model, of all layers at once.

    Args:
        length: positions [0, length) are used.

    Raises:
        UnsupportedModelError: the model's keys at different positions are not the same keys rotated by halves: another
            kind of positions, layers without any, or frequencies that depend on a text's length.
    """

    def __init__(self, runner: TargetRunner, length: int) -> None:
        self._runner = runner
        length = max(length, _PROBED + 1)
        cos, sin = self._table(torch.arange(length, device=runner.device))
        # At position 0 all cosines are 1: what stands there is YaRN's factor.
        self._scale = cos[:1]
        self._cos, self._sin = cos / self._scale, sin / self._scale
        self._check(_PROBED, length - 1)

    def turn(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys without a position (..., n, d) -> keys at positions (n,)."""
        return turned(keys, self._cos[positions], self._sin[positions])

    def unturn(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys at positions (n,) -> keys without one; (..., n, d)."""
        return turned(keys, self._cos[positions], -self._sin[positions])

    def _table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (n, rotated dimensions) of the model's own embedding, float32."""
        module = rotary_module(self._runner.twin.model)
        if module is None:
            raise self._unsupported("it has no rotary embedding of its own")
        try:
            cos, sin = module(torch.empty(1, device=positions.device), positions[None])
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise self._unsupported(f"its rotary embedding is of another kind ({error})") from error
        return cos[0], sin[0]

    @torch.inference_mode()
    def _check(self, *positions: int) -> None:
        """Compares keys that the model computes at these positions with those that it computes at 0, turned.

        A token alone sees itself alone, so what enters each layer does not depend on its position.
        """
        runner, places = self._runner, (0, *positions)
        for at in positions:
            alone = self._table(torch.tensor([at], device=runner.device))
            for own, table in zip(alone, (self._cos, self._sin), strict=True):
                if not torch.allclose(own, table[at] * self._scale, atol=1e-4):
                    raise self._unsupported("its rotary frequencies depend on how long a text is")
        store = runner.new_store(len(places), 1, resident=True)
        token = runner.vocab_size // 2
        runner.forward(store.block(range(len(places)), [[token]] * len(places), bases=places), store, logits="none")
        for layer in range(runner.kv_shape.layers):
            keys = store.layer(layer)[0][:, :, 0].float().transpose(0, 1)  # (Hkv, places, d)
            moved = self.turn(keys[:, :1].expand(-1, len(places), -1), torch.tensor(places, device=runner.device))
            tolerance = _CLOSE[runner.kv_shape.dtype.itemsize] * float(keys.abs().max())
            if not torch.allclose(moved, keys, rtol=0, atol=tolerance):
                raise self._unsupported(f"the keys of layer {layer} do not turn with their position as it is known")

    def _unsupported(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self._runner.model).__name__} cannot draft on a part of a text: {why}, so its keys cannot be moved "
            "to other positions. Use view=full (method small-lm), which leaves them where they are."
        )


def turned(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE by halves on the first dimensions of a head, as many as cos and sin (n, r) have; float32 at least."""
    size = cos.shape[-1]
    x = keys[..., :size].to(torch.promote_types(keys.dtype, torch.float32))
    a, b = x.chunk(2, dim=-1)
    moved = (x * cos + torch.cat((-b, a), dim=-1) * sin).to(keys.dtype)
    return moved if size == keys.shape[-1] else torch.cat((moved, keys[..., size:]), dim=-1)
