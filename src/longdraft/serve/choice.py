"""One answer in progress: the engine's steps become text, log-probabilities, a finish reason and draft statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from longdraft import metrics
from longdraft.engine.request import Request
from longdraft.engine.sequence import FinishReason
from longdraft.engine.stats import Result, Step
from longdraft.engine.streaming import Detokenizer
from longdraft.serve.processors import LogprobRecorder, ProcessorFactories, PromptLogprobRecorder
from longdraft.serve.worker import RequestState, Restarted, Update
from longdraft.trees.tree import TokenTree

# longdraft's finish reason -> OpenAI's. Who hears of a cancelled answer had it cut by the server's limit of time.
FINISH_REASONS: dict[str | None, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "length"}


@dataclass
class SpecDecodingStats:
    """Draft statistics, counted as vLLM counts them: a draft is a verification that had drafted tokens.

    Attributes:
        num_accepted_tokens_per_pos: position in the draft, from 0 -> drafts whose token there was accepted.
        rounds: verifications. emitted: tokens that they emitted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: Counter[int] = field(default_factory=Counter)
    num_rounds: int = 0
    num_emitted_tokens: int = 0

    def observe(self, step: Step) -> None:
        if step.tree is None:  # a text was read
            return
        self.num_rounds += 1
        self.num_emitted_tokens += len(step.token_ids)
        if step.drafted:
            self.num_drafts += 1
            self.num_draft_tokens += step.drafted
            self.num_accepted_tokens += step.accepted
            self.num_accepted_tokens_per_pos.update(range(step.accepted))

    def __add__(self, other: SpecDecodingStats) -> SpecDecodingStats:
        return SpecDecodingStats(
            self.num_drafts + other.num_drafts, self.num_draft_tokens + other.num_draft_tokens, self.num_accepted_tokens + other.num_accepted_tokens,
            self.num_accepted_tokens_per_pos + other.num_accepted_tokens_per_pos, self.num_rounds + other.num_rounds, self.num_emitted_tokens + other.num_emitted_tokens,
        )  # fmt: skip

    @property
    def mean_accepted_length(self) -> float:
        """longdraft's figure, over all verifications."""
        return round(metrics.average([(self.num_emitted_tokens, self.num_rounds)]) or 1.0, 4)

    def as_dict(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": round(1 + self.num_accepted_tokens / self.num_drafts, 4)
            if self.num_drafts
            else 1.0,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_tokens_per_pos": [
                self.num_accepted_tokens_per_pos[i]
                for i in range(max(self.num_accepted_tokens_per_pos, default=-1) + 1)
            ],
            "mean_accepted_length": self.mean_accepted_length,
        }

    def as_vllm(self) -> dict[str, Any]:
        """The same as vLLM's responses have it; without a longest draft, which differs from round to round here."""
        at_least = [
            self.num_drafts,
            *(
                self.num_accepted_tokens_per_pos[i]
                for i in range(max(self.num_accepted_tokens_per_pos, default=-1) + 1)
            ),
            0,
        ]
        return {
            "mean_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0,
            "draft_acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": [more - most for more, most in pairwise(at_least)],
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": None,
        }


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability; None for a prompt's first.

    Attributes:
        best: the most probable tokens at its position, each with its log-probability.
    """

    token_id: int
    logprob: float | None
    top_logprobs: list[tuple[int, float]]


@dataclass(frozen=True)
class Delta:
    """The text that one step adds to an answer.

    Attributes:
        token_ids: the new tokens; their text may come later. scored: the same, if log-probabilities were asked for.
        finish_reason: longdraft's finish reason, set on the last delta.
    """

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    trace: dict[str, Any] | None = None
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()


class Choice(RequestState):
    """One answer to a request.

    Args:
        num_logprobs: how many of the most probable tokens to report at each position; None: no log-probabilities.
        traced: report what each round drafted.
        echo: the prompt as text, which the answer begins with; None: it does not.
    """

    def __init__(
        self,
        request: Request,
        method: str,
        decode: Callable[[list[int]], str],
        processor_factories: ProcessorFactories = (),
        num_logprobs: int | None = None,
        include_trace: bool = False,
        echo: str | None = None,
    ) -> None:
        super().__init__(
            request,
            method,
            processor_factories=processor_factories if num_logprobs is None else [self._record, *processor_factories],
        )
        self._decode = decode
        self._log_probs, self._traced, self._echo = num_logprobs, include_trace, echo
        self.text, self.num_tokens, self.num_prefilled_tokens = "", 0, 0  # read: how much of the prompt is
        self._begin()
        self.result: Result | None = None
        self.first_token_time = 0.0  # time.monotonic()
        self._recorder: LogprobRecorder | None = None

    def _record(self) -> LogprobRecorder:
        assert self._log_probs is not None
        if self._echo is None:
            self._recorder = LogprobRecorder(self._log_probs)
        else:
            self._recorder = PromptLogprobRecorder(self._log_probs, prompt=self._prompt)
        return self._recorder

    def process_update(self, update: Update) -> Iterator[Delta]:
        """Yields the deltas that an update adds to the answer; raises the update if it is an error."""
        if isinstance(update, Exception):
            raise update
        if isinstance(update, Restarted):
            self._begin()
            return
        if isinstance(update, Result):
            self.result = update
            yield Delta(finish_reason=update.finish_reason)
            return
        if update.mode == "prefill":
            self.num_prefilled_tokens = update.prefilled
        if update.token_ids and not self.first_token_time:
            self.first_token_time = time.monotonic()
            if self._echo is not None:
                yield Delta(self._echo, tuple(self._scored_prompt()))
        self.spec_stats.observe(update)
        self._text += update.text
        recorder = self._recorder
        scored = [] if recorder is None else [TokenLogprob(token, *recorder.pop(token)) for token in update.token_ids]
        known = max(0, self.num_tokens - self._tokens)
        new = tuple(scored[known:])
        self._tokens += len(update.token_ids)
        self.num_tokens = max(self.num_tokens, self._tokens)
        trace = self._trace(update, self._tokens, self._detokenizer) if self._traced else None
        added = self._text[len(self.text) :]
        ids = update.token_ids[known:]
        if added or ids or trace:
            self.text += added
            yield Delta(added, new, trace, token_ids=ids)

    def _begin(self) -> None:
        """Resets the counters of the text: the request has begun (again), and its tokens are repeated."""
        self._text, self._tokens, self._detokenizer = "", 0, Detokenizer(self._decode)
        self.spec_stats = SpecDecodingStats()

    @property
    def _prompt(self) -> list[int]:
        return cast("list[int]", self.request.prompt)

    def _scored_prompt(self) -> Iterator[TokenLogprob]:
        """The prompt's tokens with their log-probabilities, if they are asked for."""
        if isinstance(self._recorder, PromptLogprobRecorder):
            yield TokenLogprob(self._prompt[0], None, [])
            for token, scored in zip(self._prompt[1:], self._recorder.prompt_logprobs, strict=True):
                yield TokenLogprob(token, *scored)

    def _trace(self, step: Step, tokens: int, detokenizer: Detokenizer) -> dict[str, Any]:
        if step.mode == "prefill" and not step.token_ids:
            return {"phase": "prefill", "read": step.prefilled, "of": len(self.request.prompt)}
        if step.tree is None and not step.token_ids:
            return {}
        tree, drawn = step.tree, None
        sources = ["target"] * len(step.token_ids)
        if tree is not None:
            node_sources = ["target", *(_proposer(tree, i) for i in range(1, tree.size))]
            for i, node in enumerate(step.path[1:][: step.from_draft]):
                sources[i] = node_sources[node]
            drawn = {
                "tokens": [self._decode([token]) for token in tree.tokens], "parents": tree.parents,
                "sources": node_sources, "accepted": step.path, "logprobs": [round(x, 3) for x in tree.logprobs],
            }  # fmt: skip
        pieces = [[detokenizer.push(token), source] for token, source in zip(step.token_ids, sources, strict=True)]
        seconds = time.monotonic() - self.first_token_time
        return {
            "phase": "round", "round": self.spec_stats.num_rounds, "tree": drawn,
            "pieces": [piece for piece in pieces if piece[0]],
            "tokens_per_second": round(metrics.tokens_per_second(tokens - 1, seconds) or 0.0, 2),
            "mean_accepted_length": self.spec_stats.mean_accepted_length,
        }  # fmt: skip


def _proposer(tree: TokenTree, node: int) -> str:
    """Names the proposer of a node of a drafted tree."""
    if node in tree.lookup_nodes:
        return "lookup"
    return "grammar" if node in tree.forced_nodes else "draft"
