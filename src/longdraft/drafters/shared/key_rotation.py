"""Moves keys to other positions: undoes the model's rotary embedding (RoPE), and applies it at another position.

So a key can be stored without a position ("before RoPE") and read at any position. YaRN also scales cos and sin. This
scale stays in a key whose rotation is undone.
Shapes: n keys or positions, Hkv KV heads, head size d, of which RoPE rotates r dimensions.
"""

from __future__ import annotations

import torch

from longdraft.errors import UnsupportedModelError
from longdraft.model.rope import CosSin, apply_rotary, rotary_module
from longdraft.model.runner import TargetRunner

# Bytes of the keys' dtype -> largest difference that counts as rounding, relative to the largest number in the keys.
_TOLERANCE = {2: 4e-2, 4: 1e-3, 8: 1e-3}
_PROBE_POSITION = 7  # keys are compared at this position; any but 0 would do


class KeyRotation:
    """Rotates keys of a hosted model to positions in [0, length). Keys of all layers rotate alike.
    Raises UnsupportedModelError if a layer does not rotate the halves of its heads (as Llama does), or if RoPE's
    frequencies depend on the text's length."""

    def __init__(self, runner: TargetRunner, length: int) -> None:
        self._runner = runner
        length = max(length, _PROBE_POSITION + 1)
        if runner.rope_regime(length):
            raise self._unsupported("its rotary frequencies depend on how long a text is")
        cos, sin = self._model_cos_sin(torch.arange(length, device=runner.device))
        # The cosine of angle 0 is 1, so cos at position 0 is YaRN's scale.
        self._yarn_scale = cos[:1]
        self._cos, self._sin = cos / self._yarn_scale, sin / self._yarn_scale
        self._check_rotation(_PROBE_POSITION, length - 1)

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotates keys (..., n, d), which have no position yet, to positions (n,)."""
        return apply_rotary(keys, self._cos[positions], self._sin[positions])

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Undoes the rotation of keys (..., n, d) that are at positions (n,)."""
        return apply_rotary(keys, self._cos[positions], -self._sin[positions])

    def _model_cos_sin(self, positions: torch.Tensor) -> CosSin:
        """Returns cos and sin (n, r) of the model's rotary embedding at positions (n,), float32."""
        rotary_embedding = rotary_module(self._runner.execution_model.model)
        if rotary_embedding is None:
            raise self._unsupported("it has no rotary embedding of its own")
        try:
            cos, sin = rotary_embedding(torch.empty(1, device=positions.device, dtype=torch.float32), positions[None])
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise self._unsupported(f"its rotary embedding is of another kind ({error})") from error
        return cos[0], sin[0]

    @torch.inference_mode()
    def _check_rotation(self, *positions: int) -> None:
        """Compares the model's keys at these positions with its keys at position 0 after :meth:`rotate`.
        Each sequence is one token, which attends only to itself, so keys differ by rotation alone.
        Raises UnsupportedModelError if they differ otherwise."""
        runner, token_positions = self._runner, (0, *positions)
        store = runner.new_store(len(token_positions), 1, resident=True)
        token_ids = [[runner.vocab_size // 2]] * len(token_positions)  # special tokens are rarely there
        batch = store.make_forward_batch(range(len(token_positions)), token_ids, root_positions=token_positions)
        runner.forward(batch, store, logits="none")
        position_ids = torch.tensor(token_positions, dtype=torch.long, device=runner.device)
        for layer in range(runner.kv_shape.layers):
            keys = store.layer(layer)[0][:, :, 0].float().transpose(0, 1)  # (Hkv, positions, d)
            rotated = self.rotate(keys[:, :1].expand(-1, len(token_positions), -1), position_ids)
            tolerance = _TOLERANCE[runner.default_kv_dtype.itemsize] * float(keys.abs().max())
            if not torch.allclose(rotated, keys, rtol=0, atol=tolerance):
                raise self._unsupported(f"the keys of layer {layer} do not rotate with their position as RoPE does")

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self._runner.model).__name__} cannot draft on a part of the context: {reason}, so its keys cannot "
            "be moved to other positions. Use view=full (method small-lm), which leaves keys at their positions."
        )
