"""Steps and results of a run, as users get them."""

from __future__ import annotations

from dataclasses import dataclass, field

from longdraft import metrics
from longdraft.engine.round_result import RoundMode, RoundResult
from longdraft.engine.sequence import FinishReason
from longdraft.engine.streaming import TextDelta
from longdraft.trees.tree import TokenTree

_REPR_CHARACTERS = 60  # of the output


@dataclass(frozen=True)
class Step:
    """One round of one sequence.

    Attributes:
        sequence: the request's number.
        token_ids: emitted tokens; empty until the prompt is read.
        from_draft: how many of them were drafted; they come first, the bonus token last.
        drafted: drafted nodes of this round.
        accepted: accepted drafted nodes.
        mode: "prefill" while the prompt is read; "full" for a verification on the full KV cache, "partial" on a partial
            one, "refresh" for a full one that corrects partial ones (SpecPV, section 3).
        seconds: wall time of the round, in its first step; 0.0 in the others.
        prefilled: prompt tokens read so far (mode "prefill").
        finish_reason: set on the last step of a sequence.
        pieces: the emitted text in deltas, each with whether it was drafted; empty without a tokenizer. Incomplete
            characters, and possible beginnings of stop strings, come with a later step.
        tree: the verified tree, rooted at the last token before; None in prefill, and if the sequence was aborted.
        path: accepted nodes of the tree, root first.
    """

    sequence: int
    token_ids: tuple[int, ...]
    from_draft: int
    drafted: int
    accepted: int
    mode: RoundMode
    seconds: float
    prefilled: int = 0
    finish_reason: FinishReason | None = None
    pieces: tuple[TextDelta, ...] = ()
    tree: TokenTree | None = field(default=None, repr=False)
    path: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The emitted text. Those of all steps together are the result's."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(repr=False)
class Result:
    """A finished sequence. Figures are defined in docs/figures.md. A list of prompts shares seconds and memory.

    Attributes:
        text: the output, without a stop string that ended it; empty without a tokenizer.
        token_ids: emitted tokens, EOS included.
        rounds: verification forwards of this sequence, with partial ones.
        partial_rounds: verification forwards on a partial cache.
        partial_tokens: tokens that these emitted.
        rolled_back: always 0; for scripts that read it.
        cached_tokens: prompt tokens whose KV was in the cache already.
        prefill_seconds, decode_seconds: wall time of reading the prompts, and of everything after.
        peak_memory_bytes: peak of the process (CPU) or of the allocator (GPU).
        from_draft: for each token, whether it was drafted.
        pieces: the text in deltas, each with whether it was drafted.
        arithmetic: the target's: "int8", or its dtype.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    method: str
    exact: bool
    finish_reason: FinishReason
    prefill_seconds: float
    decode_seconds: float
    rounds: int
    drafted: int = 0
    accepted: int = 0
    peak_memory_bytes: int = 0
    partial_rounds: int = 0
    partial_tokens: int = 0
    rolled_back: int = 0
    cached_tokens: int = 0
    from_draft: list[bool] = field(default_factory=list)
    pieces: list[TextDelta] = field(default_factory=list)
    arithmetic: str = "float32"

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _REPR_CHARACTERS else f"{self.text[:_REPR_CHARACTERS]}..."
        return f"Result({text!r}, {self.summary})"

    @property
    def summary(self) -> str:
        """The figures in one line."""
        figures = f"{self.prompt_tokens:,} + {self.new_tokens:,} tokens, {self.finish_reason}"
        if self.rounds:
            figures += f", {self.mean_accepted_length:.2f} mean accepted length, {self.tokens_per_second:.1f} tokens/s"
        return f"{self.method}, {'exact' if self.exact else 'approximate'}: {figures}"

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first / decode seconds; 0.0 if the prefill emitted all."""
        return metrics.tokens_per_second(self.new_tokens - 1, self.decode_seconds) or 0.0

    @property
    def mean_accepted_length(self) -> float:
        """New tokens after the first / verification forwards. Bonus tokens count."""
        return metrics.average([(self.new_tokens - 1, self.rounds)]) or 0.0


def make_step(round_result: RoundResult, seconds: float) -> Step:
    """Converts a round's result to a step."""
    sequence = round_result.sequence
    return Step(
        sequence=sequence.index,
        token_ids=round_result.new_token_ids,
        from_draft=round_result.num_accepted,
        drafted=round_result.tree.num_draft_tokens,
        accepted=round_result.num_accepted,
        mode=round_result.mode,
        seconds=seconds,
        prefilled=len(sequence.prompt),
        finish_reason=sequence.finish_reason,
        tree=round_result.tree,
        path=round_result.path,
    )
