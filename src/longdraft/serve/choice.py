"""A choice in progress: turns the engine's steps into deltas of text and log-probabilities, and draft statistics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, cast

from longdraft import metrics
from longdraft.engine.request import Request
from longdraft.engine.sequence import FinishReason
from longdraft.engine.stats import Result, Step
from longdraft.engine.streaming import Detokenizer
from longdraft.serve.processors import LogprobRecorder, ProcessorFactories, PromptLogprobRecorder, TokenLogprob
from longdraft.serve.worker import RequestState, Restarted, Update
from longdraft.trees.tree import TokenTree

# longdraft's finish reason -> OpenAI's. The engine's "cancelled" reaches a response only when the server's timeout
# ended the choice; OpenAI has no such reason, so it becomes "length".
FINISH_REASONS: dict[str | None, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "length"}


@dataclass
class SpecDecodingStats:
    """Draft statistics with vLLM's definitions. ``num_drafts`` counts the verifications that had drafted tokens."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # {position in the draft, from 0: number of drafts whose token there was accepted}
    num_accepted_tokens_per_pos: Counter[int] = field(default_factory=Counter)
    num_rounds: int = 0  # verifications with or without a draft
    num_emitted_tokens: int = 0  # by all verifications

    def observe(self, step: Step) -> None:
        """Counts a verification and its drafted tokens."""
        if step.tree is None:  # a prefill step
            return
        self.num_rounds += 1
        self.num_emitted_tokens += len(step.token_ids)
        if step.drafted:
            self.num_drafts += 1
            self.num_draft_tokens += step.drafted
            self.num_accepted_tokens += step.accepted
            self.num_accepted_tokens_per_pos.update(range(step.accepted))

    def __add__(self, other: SpecDecodingStats) -> SpecDecodingStats:
        return SpecDecodingStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def mean_acceptance_length(self) -> float:
        """vLLM's metric and JSON key: mean number of tokens by verifications with a draft, bonus token included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def accepted_per_pos(self) -> list[int]:
        """``num_accepted_tokens_per_pos`` as a list."""
        counts = self.num_accepted_tokens_per_pos
        return [counts[i] for i in range(max(counts, default=-1) + 1)]

    @property
    def mean_accepted_length(self) -> float:
        """longdraft's metric and JSON key: mean number of tokens by all verifications, with a draft or without."""
        return round(metrics.average([(self.num_emitted_tokens, self.num_rounds)]) or 1.0, 4)

    def as_dict(self) -> dict[str, Any]:
        """Returns the field ``speculation`` of the usage object."""
        return {
            "mean_acceptance_length": round(self.mean_acceptance_length, 4), "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens, "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_tokens_per_pos": self.accepted_per_pos, "mean_accepted_length": self.mean_accepted_length,
        }  # fmt: skip

    def as_vllm(self) -> dict[str, Any]:
        """Returns the statistics as in vLLM's responses. ``num_spec_tokens`` is null, because drafts vary in length."""
        at_least = [self.num_drafts, *self.accepted_per_pos, 0]  # [i]: number of drafts with i accepted tokens or more
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": [n - n_next for n, n_next in pairwise(at_least)],
            "num_spec_steps": self.num_drafts, "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens, "num_spec_tokens": None,
        }  # fmt: skip


@dataclass(frozen=True)
class Delta:
    """The tokens and text that one step adds to a choice."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # the new tokens' log-probabilities; empty if the request asks for none
    trace: dict[str, Any] | None = None  # the response's field ``trace``; None if the request does not ask for it
    finish_reason: FinishReason | None = None  # longdraft's finish reason, set on the last delta
    token_ids: tuple[int, ...] = ()  # the new tokens; their text may come with a later delta


class Choice(RequestState):
    """One of a request's ``n`` answers. See :class:`RequestState` for arguments that are missing here.

    Args:
        method: name of the decoding method.
        decode: returns the text of token ids.
        num_logprobs: how many of the most probable tokens to report at each position; None: no log-probabilities.
        include_trace: report what each round drafted.
        echo: the prompt as text, to put before the answer; None: no echo.

    Attributes:
        text: the text reported so far.
        num_reported_tokens: number of tokens reported so far. A restarted request decodes them again.
        num_prefilled_tokens: number of prompt tokens read so far.
        result: the engine's result; None until the choice ends.
        spec_stats: draft statistics since the start or the last restart.
        first_token_time: ``time.monotonic()`` at the first token; 0 before it.
    """

    def __init__(
        self, request: Request, method: str, decode: Callable[[list[int]], str],
        processor_factories: ProcessorFactories = (), num_logprobs: int | None = None, include_trace: bool = False,
        echo: str | None = None,
    ) -> None:  # fmt: skip
        recorder_factories = [] if num_logprobs is None else [self._new_recorder]
        super().__init__(request, method, processor_factories=[*recorder_factories, *processor_factories])
        self._decode, self._num_logprobs, self._include_trace, self._echo = decode, num_logprobs, include_trace, echo
        self.text, self.num_reported_tokens, self.num_prefilled_tokens = "", 0, 0
        self._reset()
        self.result: Result | None = None
        self.first_token_time = 0.0
        self._recorder: LogprobRecorder | None = None

    def _new_recorder(self) -> LogprobRecorder:
        assert self._num_logprobs is not None
        self._recorder = LogprobRecorder(self._num_logprobs)
        if self._echo is not None:
            self._recorder = PromptLogprobRecorder(self._num_logprobs, prompt=self._prompt)
        return self._recorder

    def process_update(self, update: Update) -> Iterator[Delta]:
        """Yields the deltas that an update adds to the answer. Raises the update if it is an error."""
        if isinstance(update, Exception):
            raise update
        if isinstance(update, Restarted):
            self._reset()
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
                yield Delta(self._echo, self._prompt_logprobs())
        self.spec_stats.observe(update)
        self._decoded_text += update.text
        logprobs = () if self._recorder is None else tuple(map(self._recorder.pop, update.token_ids))
        # A restarted request repeats tokens that have been reported.
        num_repeated = max(0, self.num_reported_tokens - self._num_decoded_tokens)
        self._num_decoded_tokens += len(update.token_ids)
        self.num_reported_tokens = max(self.num_reported_tokens, self._num_decoded_tokens)
        trace = self._trace(update) if self._include_trace else None
        new_text = self._decoded_text[len(self.text) :]
        token_ids = update.token_ids[num_repeated:]
        if new_text or token_ids or trace:
            self.text += new_text
            yield Delta(new_text, logprobs[num_repeated:], trace, token_ids=token_ids)

    def _reset(self) -> None:
        """Clears the decoded state, at the start or when a restarted request decodes its tokens again."""
        self._decoded_text, self._num_decoded_tokens, self._detokenizer = "", 0, Detokenizer(self._decode)
        self.spec_stats = SpecDecodingStats()

    @property
    def _prompt(self) -> list[int]:
        return cast("list[int]", self.request.prompt)

    def _prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Returns log-probabilities of the prompt's tokens; none if the request does not ask for them."""
        if not isinstance(self._recorder, PromptLogprobRecorder):
            return ()
        return TokenLogprob(self._prompt[0], None, []), *self._recorder.prompt_logprobs

    def _trace(self, step: Step) -> dict[str, Any]:
        """Returns the field ``trace``: progress of the prefill, or a round's drafted tree and each token's proposer."""
        if step.mode == "prefill" and not step.token_ids:
            return {"phase": "prefill", "read": step.prefilled, "of": len(self.request.prompt)}
        if step.tree is None and not step.token_ids:
            return {}
        tree, drafted_tree = step.tree, None
        proposers = ["target"] * len(step.token_ids)
        if tree is not None:
            node_proposers = ["target", *(_proposer(tree, i) for i in range(1, tree.size))]
            for i, node in enumerate(step.path[1:][: step.from_draft]):  # path[0] is the root, not a new token
                proposers[i] = node_proposers[node]
            drafted_tree = {
                "tokens": [self._decode([token]) for token in tree.tokens], "parents": tree.parents,
                "sources": node_proposers, "accepted": step.path, "logprobs": [round(x, 3) for x in tree.logprobs],
            }  # fmt: skip
        pieces = [[self._detokenizer.push(token), by] for token, by in zip(step.token_ids, proposers, strict=True)]
        seconds, num_later_tokens = time.monotonic() - self.first_token_time, self._num_decoded_tokens - 1
        return {
            "phase": "round", "round": self.spec_stats.num_rounds, "tree": drafted_tree,
            "pieces": [piece for piece in pieces if piece[0]],
            "tokens_per_second": round(metrics.tokens_per_second(num_later_tokens, seconds) or 0.0, 2),
            "mean_accepted_length": self.spec_stats.mean_accepted_length,
        }  # fmt: skip


def _proposer(tree: TokenTree, node: int) -> str:
    """Returns who proposed a node of a drafted tree: "lookup", "grammar" or "draft"."""
    return "lookup" if node in tree.lookup_nodes else "grammar" if node in tree.forced_nodes else "draft"
