"""Moves keys from one position to another, by undoing the model's rotary embedding and applying it anew.

A key that was computed at any position can so be kept without a position ("before RoPE") and read at another one. The
factor that YaRN puts on cos and sin is no rotation: it stays on the key.
"""

from __future__ import annotations

import torch

from longdraft.errors import UnsupportedModelError
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import rotary_module

# Largest difference between equal keys because of rounding, relative to the largest number; by bytes of the dtype.
_CLOSE = {4: 1e-3, 8: 1e-3, 2: 4e-2}
# A position at which keys are compared; any but 0 will do.
_PROBED = 7


class KeyRotation:
    """Rotates keys of a hosted model, of all layers at once.

    Args:
        length: positions [0, length) are used.

    Raises:
        UnsupportedModelError: the model's keys are not rotated by halves in every layer, or by frequencies that
            depend on the text's length.
    """

    def __init__(self, runner: TargetRunner, length: int) -> None:
        self._runner = runner
        length = max(length, _PROBED + 1)
        if runner.rope_regime(length):
            raise self._unsupported("its rotary frequencies depend on how long a text is")
        cos, sin = self._table(torch.arange(length, device=runner.device))
        # At position 0 all cosines are 1, so the table has YaRN's factor there.
        self._scale = cos[:1]
        self._cos, self._sin = cos / self._scale, sin / self._scale
        self._check(_PROBED, length - 1)

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys without a position (..., n, d) -> keys at positions (n,)."""
        return apply_rotary(keys, self._cos[positions], self._sin[positions])

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys at positions (n,) -> keys without one; (..., n, d)."""
        return apply_rotary(keys, self._cos[positions], -self._sin[positions])

    def _table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (n, rotated dimensions) of the model's rotary embedding, float32."""
        module = rotary_module(self._runner.execution_model.model)
        if module is None:
            raise self._unsupported("it has no rotary embedding of its own")
        try:
            cos, sin = module(torch.empty(1, device=positions.device, dtype=torch.float32), positions[None])
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise self._unsupported(f"its rotary embedding is of another kind ({error})") from error
        return cos[0], sin[0]

    @torch.inference_mode()
    def _check(self, *positions: int) -> None:
        """Compares the model's keys at these positions with its keys at 0 after a rotation.

        The text is a single token, which attends to itself only, so the input of each layer does not depend on its
        position.
        """
        runner, places = self._runner, (0, *positions)
        store = runner.new_store(len(places), 1, resident=True)
        token = runner.vocab_size // 2
        runner.forward(
            store.make_forward_batch(range(len(places)), [[token]] * len(places), root_positions=places),
            store,
            logits="none",
        )
        everywhere = torch.tensor(places, dtype=torch.long, device=runner.device)
        for layer in range(runner.kv_shape.layers):
            keys = store.layer(layer)[0][:, :, 0].float().transpose(0, 1)  # (Hkv, places, d)
            moved = self.rotate(keys[:, :1].expand(-1, len(places), -1), everywhere)
            tolerance = _CLOSE[runner.default_kv_dtype.itemsize] * float(keys.abs().max())
            if not torch.allclose(moved, keys, rtol=0, atol=tolerance):
                raise self._unsupported(f"the keys of layer {layer} do not turn with their position as it is known")

    def _unsupported(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self._runner.model).__name__} cannot draft on a part of a text: {why}, so its keys cannot be moved "
            "to other positions. Use view=full (method small-lm), which leaves them where they are."
        )


def apply_rotary(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first r dimensions of keys (..., n, d) by halves, in float32 at least; cos and sin are (n, r)."""
    size = cos.shape[-1]
    x = keys[..., :size].to(torch.promote_types(keys.dtype, torch.float32))
    a, b = x.chunk(2, dim=-1)
    moved = (x * cos + torch.cat((-b, a), dim=-1) * sin).to(keys.dtype)
    return moved if size == keys.shape[-1] else torch.cat((moved, keys[..., size:]), dim=-1)
