"""EAGLE-3: a one-layer drafter that reads what the target thought of each token (Li et al. 2025; SpecPV, section 3.1).

    g_t = fc(f_t)                           f_t: three hidden states of the target at position t, side by side
    x_t = [RMSNorm(embed(token_{t+1})), RMSNorm(g_t)]
    a_t = g_t + Attn(x_t)                   q, k, v from twice the hidden size; RoPE at position t
    o_t = a_t + SwiGLU(RMSNorm(a_t))
    logits of token_{t+2} = head(RMSNorm(o_t))

Row t joins the target's hidden states at position t, kept in the store by every forward, with the token that follows,
and predicts the one after that. Past the tokens that the target has read there are no hidden states: the draft's own o
stands in for the next g. The embedding is the target's own, by reference, the head the draft's. EAGLE-3.1 norms the
hidden states before fc, and o before it becomes the next g.

A round: the rows that are new since the last one enter the draft's own cache (a window where the draft has one), the
newest of them, which carries the root, goes through the whole layer; then the tree grows level by level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from longdraft.drafters.shared.block import DraftBlock, Layer, initialise
from longdraft.drafters.shared.neural import CHUNK, NeuralDrafter
from longdraft.drafters.shared.retrieval import RetrievalOptions
from longdraft.drafters.shared.round import BoundDraft
from longdraft.drafters.shared.rows import Rows
from longdraft.drafts import draft_folder, formats
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.draft_folder import OFFSETS, DraftFolder
from longdraft.drafts.eagle_formats import KIND, Eagle3Shape, usual_layers
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine import method
from longdraft.engine.event import Event
from longdraft.engine.method import Method
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, CheckpointError
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.key_rotation import turned
from longdraft.model.rotary import Rotary
from longdraft.model.runner import TargetRunner
from longdraft.options import Options, option, parse
from longdraft.trees.kind import TreeKind
from longdraft.trees.options import TreeOptions
from longdraft.views.draft_cache import PIECE, CompactCache, DraftCache

Own = TypeVar("Own", bound="Eagle3Draft")


class Eagle3Block(DraftBlock):
    """The module. Its state dict is the published layout; the tables ``d2t`` and ``t2d`` are kept beside it."""

    norm: nn.RMSNorm
    norm_output = False

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape, self.norm_output = shape, shape.norm_output
        eps, size, hidden = shape.rms_norm_eps, shape.feature_size, shape.hidden_size
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(size, eps)
        if shape.fc_norm is not None:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size // shape.fc_norm, eps) for _ in range(shape.fc_norm))
        if shape.embedding is not None:
            self.embed_tokens = nn.Embedding(shape.embedding, hidden)
        self.fc = nn.Linear(size, hidden, bias=False)
        self.midlayer = Layer(shape, 2 * hidden, "input_layernorm", "hidden_norm")
        self.further = tuple(Layer(shape, hidden, "input_layernorm") for _ in range(1, shape.decoder_layers))
        if self.further:
            self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(self.further, 1)})
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, shape.vocabulary, bias=False)
        self.plain = not shape.qk_norm and not shape.output_bias and not self.further

    @property
    def first(self) -> Layer:
        return self.midlayer

    def initialise(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        """Normal weights, unit norms, zero output projections.

        Args:
            head: (vocabulary, hidden) rows of the target's head to start from.
        """
        initialise(self, seed, std)
        if head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(head)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.fc_norm is not None:
            parts = features.chunk(self.shape.fc_norm, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(features)
        return out

    def following(self, out: torch.Tensor) -> torch.Tensor:
        following: torch.Tensor = self.norm(out) if self.norm_output else out
        return following

    def joined(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert g is not None
        normed: torch.Tensor = self.midlayer.hidden_norm(g)
        n = torch.cat([self.midlayer.input_layernorm(x), normed], -1)
        return n, normed if self.shape.norm_before_residual else g

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(out))
        return logits


class Eagle3Draft(TrainedDraft[BoundDraft]):
    """A trained draft of EAGLE's kind, in any layout.

    Attributes:
        layout: "longdraft", "published" or "speculators".
        rope: RoPE's parameters as transformers names them.
        layers: decoder layers of the target whose outputs it reads; None: the usual ones.
        window: keys that a query sees, its own included; None: all.
        decoder_layers: layers of the module.
    """

    kind, label = KIND, "EAGLE-3"
    shape_type: ClassVar[type[Any]] = Eagle3Shape
    module_type: ClassVar[type[Any]] = Eagle3Block
    levels: int | None = None  # of a dynamic tree; None: as usual
    decoder_layers = 1

    def __init__(self, folder: Path | str, contents: DraftFolder, rope: dict[str, Any]) -> None:
        super().__init__(folder, contents)
        self.rope = rope
        self.layout: str = self.config.get("layout", "longdraft")
        layers = self.config.get("feature_layers")
        self.layers: tuple[int, ...] | None = None if layers is None else tuple(layers)
        self.decoder_layers = int(self.config.get("decoder_layers") or 1)
        self.window = draft_folder.number(self.config, "window", folder)

    @classmethod
    def load(cls: type[Own], folder: Path | str) -> Own:
        """Reads a draft folder: ours, a published one, or one of `speculators`.

        Raises:
            CheckpointError: unreadable, another kind of draft, or tensors missing, unexpected or of a wrong shape.
        """
        return cls(folder, *formats.read(folder, cls.kind))

    @cached_property
    def shape(self) -> Any:
        shape = super().shape
        if shape.heads % shape.kv_heads:
            raise CheckpointError(f"{self.folder}: {shape.heads} heads are no multiple of {shape.kv_heads} KV heads.")
        return shape

    @property
    def reach(self) -> int | None:
        """Longest context that its positions support, YaRN included; None if the folder does not say."""
        rope = self.rope
        if rope["rope_type"] == "yarn":
            return int(float(rope["factor"]) * int(rope["original_max_position_embeddings"]))
        if rope["rope_type"] == "longrope":
            return int(rope.get("original_max_position_embeddings") or self.trained_length or 0) or None
        return self.trained_length

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """Decoder layers of the target whose outputs it reads, low to high.

        Raises:
            CheckpointError: the target has no such layers.
        """
        count = runner.depth
        layers = self.layers or self.usual_layers(count)
        if min(layers) < 0 or max(layers) >= count or list(layers) != sorted(set(layers)):
            raise CheckpointError(
                f"The draft in {self.folder} reads the outputs of layers {_listed(layers)} of its target, "
                f"counted from 0; this one has {count}, and they must be there and increase. Load the target it was "
                "trained with, or correct the layers in its config.json."
            )
        return layers

    def usual_layers(self, count: int) -> tuple[int, ...]:
        """The layers that such drafts read of a target with ``count`` layers, if their folders name none."""
        return usual_layers(count)

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.shape.hidden_size} if self.shape.embedding is None else {}

    def save(self, folder: Path | str, bits: int | None = None) -> None:
        if self.layout != "longdraft":
            raise CapabilityError(f"{self.folder} has a layout that others publish: copy the folder as it is.")
        super().save(folder, bits)

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        hidden, shape = runner.parts.hidden_size, self.shape
        layers = self.feature_layers(runner)
        if shape.feature_size != len(layers) * hidden:
            raise CheckpointError(
                f"The draft in {self.folder} reads {shape.feature_size} numbers of a token; {len(layers)} layers of "
                f"this target have {len(layers) * hidden}. Load the target it was trained with."
            )
        size = runner.parts.head.shape[0]
        if self.ids is None and shape.vocabulary != size:
            raise CheckpointError(
                f"The draft in {self.folder} knows {shape.vocabulary} tokens, this target {size}, and its weights hold "
                f"no {OFFSETS}, which would say which: copy the draft again."
            )
        self.rotary(torch.float32, "cpu")

    def remarks(self, runner: TargetRunner) -> list[str]:
        """Settings that may cost acceptance, a sentence each. None affects correctness."""
        found = []
        target, head = runner.parts.description, self.shape.head_dim
        theta, own = target["rope_theta"], self.rope["rope_theta"]
        if theta is not None and float(theta) != float(own):
            found.append(
                f"its rope_theta is {own:g}, the target's {float(theta):g}: if few tokens are accepted, try the other "
                "(rope_theta in its config.json)"
            )
        if head != target["head_dim"]:
            found.append(f"its head size is {head}, the target's {target['head_dim']}: check head_dim")
        usual, layers = self.usual_layers(runner.depth), self.feature_layers(runner)
        if layers != usual:
            found.append(
                f"it reads the outputs of layers {_listed(layers)}; usual for this target are {_listed(usual)}"
            )
        if self.window is None and self.reach is not None and self.reach < runner.context_length:
            found.append(
                f"it was trained for texts of {self.reach:,} tokens, the target reads {runner.context_length:,}: of "
                f"longer ones it sees the last {self.reach:,} (-o window=N, or YaRN in its config.json, changes that)"
            )
        if self.ids is not None and not bool((self.ids[1:] > self.ids[:-1]).all()):
            found.append("d2t does not name increasing tokens: does it hold ids where offsets belong?")
        return found

    def rotary(self, dtype: torch.dtype, device: torch.device | str) -> Rotary:
        """Its own rotary embedding, whose base and stretching may differ from the target's."""
        return Rotary(self.shape.head_dim, self.rope, dtype, device)

    @property
    def reads_through(self) -> bool:
        """True if the rows of a text go through several layers, which see the rows before in each."""
        return self.decoder_layers > 1

    def make(self, runner: TargetRunner) -> BoundDraft:
        rotary = self.rotary(runner.kv_shape.dtype, runner.device)
        return BoundDraft(runner, self.placed(runner), rotary, self.ids)


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


@dataclass(frozen=True)
class WindowOptions(Options):
    """The tokens that an EAGLE draft sees."""

    window: int | None = option(
        min=1, help="the draft sees so many tokens back and no further", usual="its folder's, or the trained length"
    )


class Eagle3Drafter(NeuralDrafter):
    """Drafts trees with an EAGLE-3 layer.

    With retrieval, it sees the chunks of the text that the target attends to, at compact positions, and keeps its own
    keys of the whole text behind them (SpecExtend, section 2.2); a window that its folder names is then the room that
    they have.

    Args:
        draft: a trained draft.
        options: of :class:`TreeOptions`, :class:`WindowOptions` and :class:`RetrievalOptions`.
    """

    options: ClassVar[tuple[type[Options], ...]] = (TreeOptions, WindowOptions, RetrievalOptions)
    ahead = 1
    draft: Eagle3Draft

    def __init__(self, draft: Eagle3Draft, **options: Any) -> None:
        tree, own, *others = parse(draft.label, options, *self.options)
        retrieval: RetrievalOptions = others[0] if others else RetrievalOptions()
        self.tree = self.shaped(tree.kind("opt" if retrieval.retrieval else "dynamic", draft.levels), draft, options)
        self.window = draft.window if own.window is None else own.window
        if self.window is not None and self.tree.depth >= self.window:
            whose = f"{draft.folder}: " if own.window is None else ""
            raise ValueError(
                f"{whose}window must be more tokens than the tree has levels ({self.tree.depth}), got {self.window}"
            )
        if retrieval.retrieval and own.window is not None:
            raise ValueError("window and retrieval both say what the draft sees: give one of them")
        self.retrieval = retrieval.made(draft, None if self.window is None else self.window - self.tree.depth)
        if self.retrieval is not None:
            self.window = None
        self.draft = draft

    def shaped(self, tree: TreeKind, draft: Eagle3Draft, options: Mapping[str, Any]) -> TreeKind:
        """The tree as the draft can grow it. ``options`` are the user's."""
        return tree

    def feature_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """The layers that the draft's folder names, usually three."""
        return self.draft.feature_layers(runner)

    @property
    def scratch(self) -> int:
        """Rows of its own cache that a round needs behind the text."""
        return self.tree.max_expanded

    def own_kv(self) -> KVShape:
        """The shape of the draft's own keys and values."""
        shape = self.draft.shape
        return KVShape(self.draft.decoder_layers, shape.kv_heads, shape.head_dim, self.runner.kv_shape.dtype)

    def make_cache(self) -> DraftCache:
        capacity, own = self.store.capacity, self.own_kv()
        if self.retrieval is not None:
            rotary, view = self.bound.rotary, self.retrieval.view
            store = self.own_store(own, view.capacity + self.scratch)
            full = KVStore(own, self.store.slots, capacity, self.runner.device)
            # Through several layers a text is read behind a window of the working cache.
            piece = max(1, min(PIECE, (view.capacity - view.sink) // 2))
            return CompactCache(
                store, full, self.scratch, self.retrieval,
                lambda keys, places: turned(keys, *rotary.turns(places)),
                lambda keys, places: turned(keys, *rotary.turns(-places)),
                piece, view.capacity,
            )  # fmt: skip
        # RoPE tells distances alone, so in a window all are distances that the draft knows: as if the positions were
        # moved back to 0. No text of this run outgrows the store.
        seen = max(min(self.window or self.draft.reach or capacity, capacity), self.tree.depth + 1)
        # The rows that are read together through several layers see as many back as one alone.
        return self.last_rows(own, seen + (CHUNK + 1 if self.draft.reads_through else 0), self.scratch, seen)

    @torch.inference_mode()
    def observe(self, event: Event) -> None:
        """Reads a prompt's last window, keys and values alone; forgets changed rows; scores chunks when that is due."""
        if event.begins:
            self._warn(event.sequence)
        super().observe(event)
        if event.replaced is not None:  # the row before joins the first of their tokens
            self.cache.forget(event.sequence.slot, max(0, event.replaced - 1))

    def goes_back(self, end: int) -> int:
        if self.draft.reads_through:
            return self.draft.decoder_layers * (self.cache.window or end)
        return super().goes_back(end)

    def read_piece(self, sequence: Sequence, start: int, end: int) -> None:
        if not self.draft.reads_through:
            super().read_piece(sequence, start, end)
            return
        cache, slot = self.cache, sequence.slot
        if self.retrieval is None:
            cache.ready(slot, end - start)
        while start < end:
            count = cache.reading(slot, end - start)
            x, g, *_ = self.inputs(sequence, start, start + count)
            first = cache.position(slot)
            cos_sin = self.bound.rotary(torch.arange(first, first + count, device=self.runner.device))
            cache.extend(slot, count)
            self.bound.block(x, g, *cos_sin, Rows.new(cache, (slot,), count).attends(cache))
            start += count

    def _warn(self, s: Sequence) -> None:
        """Warns if a text is longer than the draft was trained for."""
        reach, length = self.draft.reach, s.longest
        what, then = "this one has", f"it sees the last {reach} tokens (another: window=N)"
        if self.retrieval is not None:
            length = min(length, self.retrieval.view.capacity + self.tree.depth)
            what, then = "its working cache has", "acceptance will be lower: give fewer chunks"
        if self.window is None and reach is not None and length > reach:
            self.draft.outgrown(reach, f"{what} up to {length}", f"{then}, or set YaRN in its config.json")


register(
    Kind(
        KIND,
        Eagle3Drafter,
        "a trained one-layer draft that reads the model's hidden states; published drafts load as they are",
        "Li et al. 2025, EAGLE-3, arXiv:2503.01840",
        load=Eagle3Draft.load,
        training=Training(
            "longdraft.training.config:Eagle3Config",
            "longdraft.training.eagle3:train_eagle3",
            "Train an EAGLE-3 draft",
        ),
    )
)
method.register(
    Method(
        "specextend-eagle3",
        partial(Eagle3Drafter, retrieval=True),  # and so an OPT-Tree
        "EAGLE-3 that sees the chunks of a long text which the model attends to, at positions it knows",
        "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
        draft_kind="eagle3",
    )
)
