"""One answer in progress: the engine's steps become text, log-probabilities, a finish reason and draft statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from longdraft import figures
from longdraft.engine.request import Request
from longdraft.engine.sequence import FinishReason
from longdraft.engine.stats import Result, Step
from longdraft.engine.streaming import Detokenizer
from longdraft.serve.processors import LogProbs, Makers, PromptLogProbs
from longdraft.serve.worker import Restarted, Ticket, Update
from longdraft.trees.tree import TokenTree

# longdraft's finish reason -> OpenAI's. Who hears of a cancelled answer had it cut by the server's limit of time.
REASONS: dict[str | None, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "length"}


@dataclass
class Speculation:
    """Draft statistics, counted as vLLM counts them: a draft is a verification that had drafted tokens.

    Attributes:
        accepted_at: position in the draft, from 0 -> drafts whose token there was accepted.
        rounds: verifications. emitted: tokens that they emitted.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    emitted: int = 0

    def count(self, step: Step) -> None:
        if step.tree is None:  # a text was read
            return
        self.rounds += 1
        self.emitted += len(step.token_ids)
        if step.drafted:
            self.drafts += 1
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.accepted_at.update(range(step.accepted))

    def __add__(self, other: Speculation) -> Speculation:
        return Speculation(
            self.drafts + other.drafts, self.drafted + other.drafted, self.accepted + other.accepted,
            self.accepted_at + other.accepted_at, self.rounds + other.rounds, self.emitted + other.emitted,
        )  # fmt: skip

    @property
    def mean_accepted_length(self) -> float:
        """longdraft's figure, over all verifications."""
        return round(figures.average([(self.emitted, self.rounds)]) or 1.0, 4)

    def as_dict(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": round(1 + self.accepted / self.drafts, 4) if self.drafts else 1.0,
            "num_drafts": self.drafts,
            "num_draft_tokens": self.drafted,
            "num_accepted_tokens": self.accepted,
            "accepted_tokens_per_pos": [self.accepted_at[i] for i in range(max(self.accepted_at, default=-1) + 1)],
            "mean_accepted_length": self.mean_accepted_length,
        }

    def as_vllm(self) -> dict[str, Any]:
        """The same as vLLM's responses have it; without a longest draft, which differs from round to round here."""
        at_least = [self.drafts, *(self.accepted_at[i] for i in range(max(self.accepted_at, default=-1) + 1)), 0]
        return {
            "mean_acceptance_length": 1 + self.accepted / self.drafts if self.drafts else 1.0,
            "draft_acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "acceptance_histogram": [more - most for more, most in pairwise(at_least)],
            "num_spec_steps": self.drafts,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": None,
        }


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability; None for a prompt's first.

    Attributes:
        best: the most probable tokens at its position, each with its log-probability.
    """

    token: int
    log_prob: float | None
    best: list[tuple[int, float]]


@dataclass(frozen=True)
class Delta:
    """The text that one step adds to an answer.

    Attributes:
        token_ids: the new tokens; their text may come later. scored: the same, if log-probabilities were asked for.
        finish: longdraft's finish reason, set on the last delta.
    """

    text: str = ""
    scored: tuple[ScoredToken, ...] = ()
    trace: dict[str, Any] | None = None
    finish: FinishReason | None = None
    token_ids: tuple[int, ...] = ()


class Choice(Ticket):
    """One answer to a request.

    Args:
        log_probs: how many of the most probable tokens to report at each position; None: no log-probabilities.
        traced: report what each round drafted.
        echo: the prompt as text, which the answer begins with; None: it does not.
    """

    def __init__(
        self,
        request: Request,
        method: str,
        decode: Callable[[list[int]], str],
        makers: Makers = (),
        log_probs: int | None = None,
        traced: bool = False,
        echo: str | None = None,
    ) -> None:
        super().__init__(request, method, makers=makers if log_probs is None else [self._record, *makers])
        self._decode = decode
        self._log_probs, self._traced, self._echo = log_probs, traced, echo
        self.text, self.tokens, self.read = "", 0, 0  # read: how much of the prompt is
        self._begin()
        self.result: Result | None = None
        self.first_token = 0.0  # time.monotonic()
        self._recorder: LogProbs | None = None

    def _record(self) -> LogProbs:
        assert self._log_probs is not None
        if self._echo is None:
            self._recorder = LogProbs(self._log_probs)
        else:
            self._recorder = PromptLogProbs(self._log_probs, prompt=self._prompt)
        return self._recorder

    def take(self, update: Update) -> Iterator[Delta]:
        """Yields the deltas that an update adds to the answer; raises the update if it is an error."""
        if isinstance(update, Exception):
            raise update
        if isinstance(update, Restarted):
            self._begin()
            return
        if isinstance(update, Result):
            self.result = update
            yield Delta(finish=update.finish_reason)
            return
        if update.mode == "prefill":
            self.read = update.prefilled
        if update.token_ids and not self.first_token:
            self.first_token = time.monotonic()
            if self._echo is not None:
                yield Delta(self._echo, tuple(self._scored_prompt()))
        self.speculation.count(update)
        self._text += update.text
        recorder = self._recorder
        scored = [] if recorder is None else [ScoredToken(token, *recorder.take(token)) for token in update.token_ids]
        known = max(0, self.tokens - self._tokens)
        new = tuple(scored[known:])
        self._tokens += len(update.token_ids)
        self.tokens = max(self.tokens, self._tokens)
        trace = self._trace(update, self._tokens, self._detokenizer) if self._traced else None
        added = self._text[len(self.text) :]
        ids = update.token_ids[known:]
        if added or ids or trace:
            self.text += added
            yield Delta(added, new, trace, token_ids=ids)

    def _begin(self) -> None:
        """Resets the counters of the text: the request has begun (again), and its tokens are repeated."""
        self._text, self._tokens, self._detokenizer = "", 0, Detokenizer(self._decode)
        self.speculation = Speculation()

    @property
    def _prompt(self) -> list[int]:
        return cast("list[int]", self.request.prompt)

    def _scored_prompt(self) -> Iterator[ScoredToken]:
        """The prompt's tokens with their log-probabilities, if they are asked for."""
        if isinstance(self._recorder, PromptLogProbs):
            yield ScoredToken(self._prompt[0], None, [])
            for token, scored in zip(self._prompt[1:], self._recorder.of_prompt, strict=True):
                yield ScoredToken(token, *scored)

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
                "sources": node_sources, "accepted": step.path, "log_probs": [round(x, 3) for x in tree.log_probs],
            }  # fmt: skip
        pieces = [[detokenizer.push(token), source] for token, source in zip(step.token_ids, sources, strict=True)]
        seconds = time.monotonic() - self.first_token
        return {
            "phase": "round", "round": self.speculation.rounds, "tree": drawn,
            "pieces": [piece for piece in pieces if piece[0]],
            "tokens_per_second": round(figures.tokens_per_second(tokens - 1, seconds) or 0.0, 2),
            "mean_accepted_length": self.speculation.mean_accepted_length,
        }  # fmt: skip


def _proposer(tree: TokenTree, node: int) -> str:
    """Names the proposer of a node of a drafted tree."""
    if node in tree.looked_up:
        return "lookup"
    return "grammar" if node in tree.forced else "draft"
