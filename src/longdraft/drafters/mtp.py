"""MTP: the multi-token prediction layer in a model's own checkpoint (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    f_t (g in the code)                                     the target's last hidden state at t, after the final norm
    n_t = eh_proj([RMSNorm(embed(token_{t+1})), RMSNorm(f_t)])
    o_t = RMSNorm(DecoderLayer(n_t))                        a layer of the target's own class
    logits of token_{t+2} = target_head(o_t)

The layer drafts several tokens in turn: in the nodes of a tree, o_t replaces f_{t+1}. If the checkpoint has several MTP
layers, only the first is used. A round runs as in EAGLE-3 (:mod:`longdraft.drafters.eagle3`).

If a model's RoPE was scaled for longer contexts, its MTP layer by default attends to a window of the original length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from longdraft.drafters.assistant import AssistantDrafter
from longdraft.drafters.eagle import LastStateBlock
from longdraft.drafters.eagle3 import Eagle3Drafter, WindowOptions
from longdraft.drafters.shared.draft_block import ALL, CrossAttend, OutputRows, SelfAttend
from longdraft.drafters.shared.draft_round import BoundDraft, DraftRound
from longdraft.drafts import draft_folder, mtp_formats, mtp_layer
from longdraft.drafts.assistant import AssistantDraft
from longdraft.drafts.draft import Draft
from longdraft.drafts.draft_folder import DraftFolder
from longdraft.engine.drafter import Drafter
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.quant import stored
from longdraft.model.rope import original_context_length
from longdraft.model.runner import TargetRunner
from longdraft.native import QuantizedMatrix
from longdraft.options import Options, takes
from longdraft.trees.options import TreeOptions

KIND = "mtp"


class MtpBlock(LastStateBlock):
    """MTP's module: norms and a projection around a decoder layer of the target's class.
    ``has_experts``: the layer is a mixture of experts.

    Raises:
        UnsupportedModelError: the layer cannot be constructed, or the target has no norm before its head.
    """

    enorm: nn.Module
    hnorm: nn.Module

    def __init__(self, runner: TargetRunner, has_experts: bool) -> None:
        super().__init__()
        size, eps = runner.shared_parts.hidden_size, runner.shared_parts.rms_norm_eps
        self.layer = mtp_layer.new_decoder_layer(runner.model, has_experts)
        for name in ("enorm", "hnorm", "norm"):
            self.add_module(name, mtp_layer.new_norm(self.layer, size, eps))
        with torch.device("meta"):
            self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.borrow_target_head(runner)

    def combine_inputs(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert g is not None
        n = self.eh_proj(torch.cat([self.enorm(x), self.hnorm(g)], -1))
        return n, n

    def keys_values(
        self, x: torch.Tensor, g: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = mtp_layer.compute_kv(self.layer, self.combine_inputs(x, g)[0], cos, sin)
        return keys[None], values[None]

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend_fns: Sequence[SelfAttend],
        output_rows: OutputRows = ALL,
        cross: CrossAttend | None = None,
    ) -> torch.Tensor:
        """Runs the module; see :meth:`DraftBlock.forward`. Returns o of the output tokens, after the final norm."""
        n, (attend,) = self.combine_inputs(x, g)[0], attend_fns
        layer_attend = attend
        if output_rows is not ALL:  # the layer gets only the output tokens, so the keys of all tokens are computed here
            keys, values = mtp_layer.compute_kv(self.layer, n, cos, sin)

            def layer_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return attend(q, keys, values)

        n, cos, sin = n[output_rows], cos[output_rows], sin[output_rows]
        out: torch.Tensor = self.norm(mtp_layer.run_layer(self.layer, n, cos, sin, layer_attend))
        return out


class MtpDraft(Draft[BoundDraft]):
    """The MTP layer of a checkpoint. Only :meth:`make` constructs the module, because it needs the target's class.

    Args:
        folder: the checkpoint, a GGUF file, or a folder of ours (``longdraft train mtp``).
        tensors: the module's, from :func:`longdraft.drafts.mtp_formats.read` or of a folder of ours.
        contents: contents of a folder of ours; None: another layout.
    """

    kind, label = KIND, "MTP"
    round_type, decoder_layers, is_multi_layer = DraftRound, 1, False
    default_depth = max_levels = window = None

    def __init__(
        self, folder: Path | str, tensors: Mapping[str, torch.Tensor | QuantizedMatrix],
        contents: DraftFolder | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder)
        self._tensors = tensors
        projection = tensors.get("eh_proj.weight")
        if projection is None:
            raise CheckpointError(f"{folder} lacks its MTP layer's fc or eh_proj: copy all files of the folder again.")
        config, target = (contents.config, contents.target) if contents else ({}, {})
        # A checkpoint's layer has the target's context length.
        self.trained_length = self.max_context = draft_folder.optional_int(config, "trained_length", folder)
        self.required_target = {"hidden_size": projection.shape[0]} | target

    @classmethod
    def load(cls, folder: Path | str) -> MtpDraft | AssistantDraft:
        """Reads the layer from a target's folder or GGUF file, without its other tensors, or from a folder of ours; or
        Gemma 4's assistant.

        Raises:
            CheckpointError: the folder is unreadable, has no MTP layer, or is a draft for another method.
        """
        if draft_folder.is_draft_folder(folder) and draft_folder.is_assistant(draft_folder.read_config(folder)):
            return AssistantDraft(folder)
        if Path(folder).is_dir() and "longdraft_format" in draft_folder.read_config(folder):
            contents = draft_folder.load(folder, KIND)
            return cls(folder, contents.tensors, contents)
        return cls(folder, mtp_formats.read(folder))

    @property
    def parameters(self) -> int:
        return sum(torch.Size(tensor.shape).numel() for tensor in self._tensors.values())

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Returns the last layer, whose output the layer reads."""
        return (runner.num_layers - 1,)

    def check(self, runner: TargetRunner) -> None:
        draft_folder.check_target(self.required_target, runner.shared_parts.description, self.folder)
        if runner.tp_rank is not None:
            raise CapabilityError("MTP layers do not run in tensor parallel: use eagle3 or prompt-lookup.")

    def make(self, runner: TargetRunner) -> BoundDraft:
        block, int8 = self._meta_block(runner), runner.arithmetic == "int8"
        mtp_layer.load_weights(block, self._tensors, runner.device, runner.kv_shape.dtype, int8=int8)
        return BoundDraft(runner, block, runner.shared_parts.rotary, None)

    def trainable_module(self, runner: TargetRunner) -> MtpBlock:
        """Returns the module with the draft's weights in float32, for further training."""
        block = self._meta_block(runner)
        tensors = self._tensors.items()
        floats = {n: stored.dequantize(t) if isinstance(t, QuantizedMatrix) else t.float() for n, t in tensors}
        block.load_state_dict(floats, assign=True)
        return block

    def _meta_block(self, runner: TargetRunner) -> MtpBlock:
        """Makes the module on the meta device. Raises CheckpointError if the tensors do not fit it."""
        block = MtpBlock(runner, any(".experts." in name for name in self._tensors))
        expected_shapes = {name: tensor.shape for name, tensor in block.state_dict().items()}
        shapes = {name: torch.empty(t.shape, dtype=torch.float32, device="meta") for name, t in self._tensors.items()}
        draft_folder.check_tensors(shapes, expected_shapes, self.folder, self.label)
        return block


@takes(TreeOptions, WindowOptions)
def mtp(draft: MtpDraft | AssistantDraft, **options: Any) -> Drafter:
    """Makes the drafter of an MTP layer or an assistant. ``options``: fields of :class:`TreeOptions` and, for a layer,
    :class:`WindowOptions`."""
    if isinstance(draft, AssistantDraft):
        return AssistantDrafter(draft, **options)
    return MtpDrafter(draft, **options)  # type: ignore[arg-type]


class MtpDrafter(Eagle3Drafter):
    """Drafts with the MTP layer of the target's own checkpoint."""

    options: ClassVar[tuple[type[Options], ...]] = (TreeOptions, WindowOptions)
    is_capturable = False  # a mixture of experts runs the experts that the data select
    draft: MtpDraft  # type: ignore[assignment]

    @torch.inference_mode()
    def kv_shape_of_draft(self) -> KVShape:
        """Returns the shape of the layer's keys and values, by computing those of one token."""
        runner, bound = self.runner, self.bound
        x = torch.zeros(1, runner.shared_parts.hidden_size, dtype=runner.kv_shape.dtype, device=runner.device)
        cos, sin = bound.rotary(torch.zeros(1, dtype=torch.long, device=runner.device))
        keys, _ = bound.block.keys_values(x, x, cos, sin)
        return KVShape(1, keys.shape[1], keys.shape[3], runner.kv_shape.dtype)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        trained_length = original_context_length(runner.model)  # before RoPE was scaled; None: it was not
        if self.window is None and trained_length is not None and store.capacity > trained_length > self.tree.depth:
            self.window = trained_length
        super().bind(runner, store)
