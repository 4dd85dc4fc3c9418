"""A small language model as a drafter: hosted as the target is, with a KV cache of its own.

A round: the tokens emitted since the last one are fed as a chain, whose last row gives the root's children; then the
tree grows level by level, each level's rows behind those of the levels before, under a mask of ancestors. Emitted
tokens are committed to the draft's cache, a tree never is.

What it sees of a long text is its view. "full": all of it, at true positions, which is plain speculative decoding with
a draft model. "streaming": the first and the last tokens. "retrieval": these, and the chunks that the target attends
to (Cha et al. 2025, SpecExtend, section 2.2). In the latter two its positions stay those of its training and a round
costs the same at any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from longdraft.drafters.shared.lm_round import LMDraftRound
from longdraft.drafters.shared.retrieval import ChunkOptions, RetrievalDrafter, make_retrieval
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.drafts.language_model import BoundLM, SmallLMDraft
from longdraft.engine import method
from longdraft.engine.method import Method
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError, UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model.key_rotation import KeyRotation
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import rotary_module
from longdraft.options import option, parse
from longdraft.trees.level import TreeLevel, topk_logprobs
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views import draft_cache
from longdraft.views.draft_cache import MIN_NEW_ENTRIES, DraftCache, RepositionedKVCache
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View

VIEWS = ("full", "streaming", "retrieval")
# A working cache of about 1K tokens is best for a draft of 68M parameters (SpecExtend, appendix E.1).
STREAMED, RECENT = 1024, 128


@dataclass(frozen=True)
class SmallLMOptions(ChunkOptions):
    """The part of a text that a small language model sees; ``sink`` and ``recent`` are of a streaming view too."""

    view: str | None = option(
        choices=VIEWS,
        help="what the draft sees: all of the text, its first and last tokens, or these and retrieved chunks",
        usual="full, or streaming for texts longer than it was trained for",
    )
    vocabulary: int | None = option(
        min=2,
        help="propose only the first so many token ids, which are the frequent ones of most tokenizers",
        usual="all",
    )


class SmallLMDrafter(RetrievalDrafter):
    """Drafts trees with a small language model.

    Args:
        draft: the model.
        options: of :class:`TreeOptions` and :class:`SmallLMOptions`. The tree is an OPT-Tree with view="retrieval",
            which is SpecExtend, and a dynamic tree without.
    """

    options = (TreeOptions, SmallLMOptions)
    bound: BoundLM

    def __init__(self, draft: SmallLMDraft, **options: Any) -> None:
        tree, seen = parse("small-lm", options, *self.options)
        view, sink, recent = seen.view, seen.sink, seen.recent
        given = seen.retrieval_sizes(view == "retrieval", "view=retrieval")
        self.tree = tree.kind("opt" if view == "retrieval" else "dynamic")
        self.draft, self.view = draft.with_trimmed_vocab(seen.vocabulary), view
        # Room behind gathered rows: at least for a round's tokens.
        fresh = max(draft_cache.MIN_NEW_ENTRIES, self.tree.depth + 1)
        room = draft.trained_length - self.tree.depth - fresh
        # sink and recent mean nothing where all is seen: schedules have options of these names too.
        self._streams = partial(_streaming, sink, recent, room, fresh) if room > sink else None
        if view == "streaming":
            self.retrieval = _streaming(sink, recent, room, fresh)
        elif view == "retrieval":
            given = {"layer": draft.retrieval_layer} | given
            recent = RECENT if recent is None else recent
            self.retrieval = make_retrieval(**given, sink=sink, recent=recent, max_tokens=room, new_tokens=fresh)

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.bound = bound = self.draft.bind(runner)
        self._store = store
        # A text has no more tokens than the target's store has rows.
        shown = self.tree.max_expanded_nodes
        outgrown = store.capacity > self.draft.trained_length and rotary_module(bound.runner.model) is not None
        if self.view is None and outgrown and self._streams is not None and not bound.runner.has_recurrent_layers:
            self.retrieval = self._streams()
        hosted, slots, capacity = bound.runner, store.slots, store.capacity
        self.cache: DraftCache = (
            # In a batch, short chains of new tokens are padded to the longest.
            DraftCache(hosted.new_store(slots, capacity + max(shown, MIN_NEW_ENTRIES)), shown)
            if self.retrieval is None
            else make_repositioned_cache(hosted, slots, capacity, shown, self.retrieval, self.draft.trained_length)
        )
        # What was fed of each slot's text, token by token.
        self.fed_token_ids: list[list[int]] = [[] for _ in range(store.slots)]

    @torch.inference_mode()
    def observe(self, round_result: RoundResult) -> None:
        """Reads a prompt; scores the text's chunks when that is due. Emitted tokens are fed in the next round.

        Raises:
            CapabilityError: the text is longer than the table of positions that the model has, in full view.
        """
        s = round_result.sequence
        self.update_retrieval(self._store, round_result)
        if round_result.is_prefill:
            if self.retrieval is None:
                self._check_length(s)
            self._cut(s.slot, 0)
            self._read(s.slot, s.tokens[:-1])

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        drafted, device = SmallLMRound(self, sequences), self.bound.runner.device
        return self.grow(sequences, drafted.expand, self.bound.draft_to_target_ids, device, limit, drafted.likeliest)

    def release(self, sequence: Sequence) -> None:
        self._cut(sequence.slot, 0)

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forgets what was read behind the first ``length`` tokens of a text."""
        if length < len(self.fed_token_ids[sequence.slot]):
            self._cut(sequence.slot, length)

    def new_tokens(self, sequence: Sequence) -> list[int]:
        """The tokens that the draft has not read, the root last, short enough to be fed at once."""
        slot, text = sequence.slot, sequence.tokens
        if len(self.fed_token_ids[slot]) >= len(text):
            self._cut(slot, len(text) - 1)
        new = text[len(self.fed_token_ids[slot]) :]
        if len(new) > self.cache.max_new_entries:
            self._read(slot, new[:-1])
            new = new[-1:]
        self.cache.make_room(slot, len(new))
        return new

    def commit(self, slot: int, tokens: list[int]) -> None:
        """Commits tokens that were fed: the first rows of the slot's block."""
        self.cache.commit(slot, len(tokens))
        self.fed_token_ids[slot] += tokens

    def _cut(self, slot: int, length: int) -> None:
        length = self.cache.restorable_length(slot, length)
        self.cache.truncate(slot, length)
        del self.fed_token_ids[slot][length:]

    def _read(self, slot: int, tokens: list[int]) -> None:
        """Feeds tokens in pieces, without drafting from them."""
        text = len(self.fed_token_ids[slot]) + len(tokens)
        while tokens:
            count = self.cache.begin_chunk(slot, len(tokens))
            piece, tokens = tokens[:count], tokens[count:]
            store = self.cache.store
            block = store.make_forward_batch([slot], [piece], is_prefill=True, prompt_len=text)
            self.bound.runner.forward(block, store, logits="none")
            self.commit(slot, piece)

    def _check_length(self, s: Sequence) -> None:
        """Warns once per draft if a text at true positions is longer than the draft was trained for."""
        draft, trained, length = self.draft, self.draft.trained_length, s.max_length
        positions = self.bound.runner.context_length
        if length > max(trained, positions) and rotary_module(self.bound.runner.model) is None:
            raise CapabilityError(
                f"The text has up to {length} tokens, and the draft {draft.folder} has positions for {positions} "
                "(learned ones, which cannot be stretched). Use a draft with a longer context, or prompt-lookup."
            )
        if length > trained:
            then = "acceptance will be lower: leave view out, or use view=retrieval (method specextend)"
            draft.warn_beyond_trained_length(trained, f"this one has up to {length}", then)


def _streaming(sink: int, recent: int | None, room: int, fresh: int) -> Retrieval:
    """A view of the first and the last tokens."""
    if recent is None:
        recent = max(1, min(STREAMED, room - sink))
    if sink + recent > room:
        raise ValueError(
            f"a working cache of {sink + recent} tokens does not fit the {room} that the draft was trained for, beside "
            "those of a round: lower sink, recent or the tree's depth"
        )
    return Retrieval(View("streaming", 0, sink, recent, max_new=fresh, shared_by_heads=True))


def make_repositioned_cache(
    runner: TargetRunner, slots: int, capacity: int, scratch: int, retrieval: Retrieval, trained_length: int
) -> RepositionedKVCache:
    """A working cache, in which a text is read in pieces: sink, tokens before the piece, piece.

    Args:
        trained_length: length of the texts that the model was trained on, at least the view's capacity.

    Raises:
        UnsupportedModelError: the model's keys cannot be moved.
        MemoryBudgetError: it does not fit the memory that is free.
    """
    if runner.has_recurrent_layers:
        raise UnsupportedModelError(
            f"{type(runner.model).__name__} has recurrent layers, whose state is of the whole text: let it draft on "
            "all of its KV (view=full)."
        )
    view = retrieval.view
    reach = min(trained_length, max(view.capacity, view.sink + view.window + draft_cache.PREFILL_CHUNK))
    piece = max(1, min(draft_cache.PREFILL_CHUNK, (reach - view.sink) // 2))
    keys = KeyRotation(runner, reach)
    store = runner.new_store(slots, reach + max(scratch, view.max_new), resident=True)
    # Rows are gathered from it, and it is never attended to.
    full = KVStore(runner.kv_shape, slots, capacity, runner.device)
    return RepositionedKVCache(store, full, scratch, retrieval, keys.rotate, keys.unrotate, piece, reach)


class SmallLMRound(LMDraftRound):
    """One round of a batch. New tokens are fed as a chain, whose last row is the root."""

    def __init__(self, drafter: SmallLMDrafter, sequences: list[Sequence]) -> None:
        super().__init__(drafter, drafter.bound.runner, drafter.cache.store, drafter.bound.fused_lm, sequences)
        self._small = drafter

    def root(self, sequence: Sequence) -> int:
        return self._store.lengths[sequence.slot] - 1

    def expand(self, level: TreeLevel) -> torch.Tensor:
        return super().expand(level) if level.depth > 0 else self._enter(level, 0)[0]

    def likeliest(self, level: TreeLevel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if level.depth > 0:
            return super().likeliest(level, count)
        logprobs, ids = self._enter(level, count)
        return logprobs, ids

    def _enter(self, level: TreeLevel, best: int) -> tuple[torch.Tensor, ...]:
        """Feeds new tokens, the roots last: logits (B', 1, draft vocabulary) of what follows them where ``best`` is
        0; else log-probabilities and draft ids (B', 1, k) of the ``best`` likeliest."""
        self._drafter.forwards += 1
        slots, chains = [s.slot for s in self.of(level)], [self._small.new_tokens(s) for s in self.of(level)]
        even = len({*map(len, chains)}) == 1
        found: tuple[torch.Tensor, ...]
        block = self._store.make_forward_batch(slots, chains)
        if best and self._whole is not None and even and self._whole.supports(self._store, sum(map(len, chains))):
            found = self._whole.topk(block, self._store, best, last_only=True)
        else:
            logits = self._runner.forward(block, self._store, logits="last" if even else "all", check_nan=False).logits
            assert logits is not None
            if not even:
                logits = torch.stack([logits[i, len(chain) - 1] for i, chain in enumerate(chains)])[:, None]
            found = topk_logprobs(logits, best) if best else (logits,)
        for slot, chain in zip(slots, chains, strict=True):
            self._small.commit(slot, chain)
        return found


register(
    Kind(
        "small-lm",
        SmallLMDrafter,
        "a small language model with the model's vocabulary, on all of the text or on a part of it",
        "Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
        load=SmallLMDraft.load,
        training=Training(
            "longdraft.training.config:LmConfig",
            "longdraft.training.lm:train_lm",
            "Train a small language model to draft",
            "lm",
        ),
    )
)
method.register(
    Method(
        "specextend",
        partial(SmallLMDrafter, view="retrieval"),  # and so an OPT-Tree
        "a small language model that sees the chunks of a long text which the model attends to",
        "Cha et al. 2025, SpecExtend, arXiv:2505.20776",
        draft_kind="small-lm",
    )
)
