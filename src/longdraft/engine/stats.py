"""Steps and results: what users get from decoding a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from longdraft import metrics
from longdraft.engine.round_result import RoundMode, RoundResult
from longdraft.engine.sequence import FinishReason
from longdraft.engine.streaming import TextDelta
from longdraft.trees.tree import TokenTree

_REPR_CHARACTERS = 60  # maximum length of the text in repr(result)


@dataclass(frozen=True)
class Step:
    """One round of one sequence.

    Attributes:
        sequence: the request's number.
        token_ids: the emitted tokens; empty until the whole prompt is read.
        from_draft: number of drafted tokens in ``token_ids``. The drafted tokens come first, the bonus token last.
        drafted: number of drafted tokens in this round's tree.
        accepted: number of accepted drafted tokens, equal to ``from_draft``.
        mode: "prefill" while the prompt is read; then the KV cache that the verification read: "full", "partial", or
            "refresh" for the full KV cache with a correction of partial rounds (SpecPV, arXiv:2512.02337, section 3).
        seconds: wall time of the round, in the step of the round's first sequence; 0.0 in the steps of the others.
        prefilled: number of prompt tokens read so far.
        finish_reason: why the sequence has finished; None before its last step.
        pieces: the emitted text in parts, each with a flag whether it was drafted; empty without a tokenizer. A later
            step has incomplete characters, and text that may begin a stop string.
        tree: the verified tree, rooted at the last token before this round; None in prefill and after an abort.
        path: the accepted nodes of the tree, root first.
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
        """The emitted text. The texts of all steps together are the text of the result."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(repr=False)
class Result:
    """The output of a request, and measurements (docs/figures.md). Prompts in one list share seconds and peak memory.

    Attributes:
        text: the output, without a stop string that ended it; empty without a tokenizer.
        token_ids: the emitted tokens, EOS included.
        prompt_tokens: number of prompt tokens.
        method: name of the method that decoded the request.
        exact: whether the output is that of plain decoding.
        finish_reason: "eos", "stop" (a stop string), "length", or "cancelled".
        prefill_seconds: wall time of reading the prompts.
        decode_seconds: wall time of all rounds after the prefill.
        rounds: number of verification forwards of this sequence, including partial verifications.
        drafted: number of tokens that were drafted for this sequence.
        accepted: number of drafted tokens that were accepted.
        peak_memory_bytes: peak memory of the process (CPU) or of torch's allocator (GPU).
        partial_rounds: number of verification forwards on a partial KV cache.
        partial_tokens: number of tokens emitted by partial rounds.
        cached_tokens: number of prompt tokens whose KV was in the prompt cache.
        from_draft: for each token of ``token_ids``, whether it was drafted.
        pieces: the text in parts, each with a flag whether it was drafted.
        arithmetic: the number format that the target computes in: "int8", or the target's dtype.
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
    cached_tokens: int = 0
    from_draft: list[bool] = field(default_factory=list)
    pieces: list[TextDelta] = field(default_factory=list)
    arithmetic: str = "float32"

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _REPR_CHARACTERS else f"{self.text[:_REPR_CHARACTERS]}..."
        return f"Result({text!r}, {self.summary})"

    @property
    def summary(self) -> str:
        """The measurements in one line."""
        figures = f"{self.prompt_tokens:,} + {self.new_tokens:,} tokens, {self.finish_reason}"
        if self.rounds:
            figures += f", {self.mean_accepted_length:.2f} mean accepted length, {self.tokens_per_second:.1f} tokens/s"
        return f"{self.method}, {'exact' if self.exact else 'approximate'}: {figures}"

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per decode second, without the first token, which the prefill emits; 0.0 if it is the only one."""
        return metrics.tokens_per_second(self.new_tokens - 1, self.decode_seconds) or 0.0

    @property
    def mean_accepted_length(self) -> float:
        """New tokens per verification forward, including bonus tokens, without the token that the prefill emits."""
        return metrics.average([(self.new_tokens - 1, self.rounds)]) or 0.0


def count_round(round_result: RoundResult) -> None:
    """Adds a round to the statistics of its sequence."""
    stats = round_result.sequence.stats
    stats.rounds += 1
    stats.drafted += round_result.tree.num_draft_tokens
    stats.accepted += round_result.num_accepted
    if round_result.mode == "partial":
        stats.partial_rounds += 1
        stats.partial_tokens += len(round_result.new_token_ids)


def make_step(round_result: RoundResult, seconds: float) -> Step:
    """Converts a round's result to a step with the wall time ``seconds``."""
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
