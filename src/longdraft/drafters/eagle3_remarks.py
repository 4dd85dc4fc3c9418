"""What looks wrong with an EAGLE-3 draft beside its target, though it can be used: for ``longdraft doctor``.

All of it costs acceptance and none of it correctness, so nothing here is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longdraft.drafters.eagle3_formats import usual_layers
from longdraft.host.runner import TargetRunner

if TYPE_CHECKING:
    from longdraft.drafters.eagle3_draft import Eagle3Draft


def remarks(draft: Eagle3Draft, runner: TargetRunner) -> list[str]:
    """A sentence for each, for a draft that :meth:`Eagle3Draft.check` lets through."""
    contents, shape, target = draft.contents, draft.shape, runner.parts.description
    found = []
    theta, own = target["rope_theta"], contents.rope["rope_theta"]
    if theta is not None and float(theta) != float(own):
        found.append(
            f"its rope_theta is {own:g}, the target's {float(theta):g}: if few tokens are accepted, try the other "
            "(rope_theta in its config.json)"
        )
    if shape.head_dim != target["head_dim"]:
        found.append(f"its head size is {shape.head_dim}, the target's {target['head_dim']}: check head_dim")
    usual, layers = usual_layers(runner.kv_shape.layers), draft.feature_layers(runner)
    if layers != usual:
        found.append(f"it reads the outputs of layers {_listed(layers)}; usual for this target are {_listed(usual)}")
    if shape.norm_before_residual and contents.layout == "published":
        found.append("norm_before_residual is set, which the published layout does not know")
    if draft.window is None and draft.reach is not None and draft.reach < runner.context_length:
        found.append(
            f"it was trained for texts of {draft.reach:,} tokens, the target reads {runner.context_length:,}: beyond, "
            f"acceptance falls; give it a window (-o window={draft.reach}) or a rope_factor"
        )
    if draft.ids is not None and not bool((draft.ids[1:] > draft.ids[:-1]).all()):
        found.append("d2t does not name increasing tokens: does it hold ids where offsets belong?")
    return found


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
