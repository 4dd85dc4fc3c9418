"""OpenAI's response objects, whole or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

from longdraft.serve.choice import FINISH_REASONS, Choice, Delta, SpecDecodingStats, TokenLogprob
from longdraft.serve.reasoning import ReasoningParser
from longdraft.serve.tool_parser import ToolParser

DONE_EVENT = "data: [DONE]\n\n"
# How OpenAI's API begins the name of a token that is a part of a character.
PARTIAL_CHAR_PREFIX = "bytes:"


def sse_event(content: Any, name: str | None = None) -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class ResponseEnvelope:
    """The fields that all chunks of a response share."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id, self.prefix = f"{prefix}-{secrets.token_hex(12)}", prefix
        self.model, self.created = model, int(time.time())

    def wrap(self, object_type: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class ChoiceBuilder(ABC):
    """Builds one choice of a response.

    Args:
        piece: token id to text and bytes. include_logprobs, include_token_ids: report log-probabilities, and token ids.
    """

    object_type: str
    chunk_object_type: str
    id_prefix: str

    def __init__(
        self,
        index: int,
        token_to_piece: Callable[[int], tuple[str, bytes]],
        include_logprobs: bool,
        include_token_ids: bool,
    ) -> None:
        self._index, self._piece, self._with_log_probs = index, token_to_piece, include_logprobs
        self._ids: list[int] | None = [] if include_token_ids else None
        self._scored: list[TokenLogprob] = []
        self._finish: str | None = None

    @abstractmethod
    def empty_chunk(self) -> dict[str, Any]:
        """The choice of a chunk that adds nothing."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for what a step adds."""

    @abstractmethod
    def full_choice(self) -> dict[str, Any]:
        """The choice of an answer that has ended."""

    def _added(self, delta: Delta) -> dict[str, Any]:
        """Keeps what a step adds of tokens; the field of a chunk's token ids, if there are any and they are wanted."""
        self._scored += delta.logprobs
        if self._ids is None or not delta.token_ids:
            return {}
        self._ids += delta.token_ids
        return {"token_ids": list(delta.token_ids)}

    def _with_ids(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice if self._ids is None else choice | {"token_ids": self._ids}


class ChatChoiceBuilder(ChoiceBuilder):
    """Builds one choice of ``/v1/chat/completions``.

    Args:
        parser: separates tool calls from text; None if the model may call no tools.
        thinking: separates what the model thinks from what it says; None: it stays in the text.
        include_reasoning: report what it thinks.

    Attributes:
        reasoning_tokens: how many tokens it has thought.
    """

    object_type, chunk_object_type, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        index: int,
        token_to_piece: Callable[[int], tuple[str, bytes]],
        include_logprobs: bool,
        include_token_ids: bool,
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
        include_reasoning: bool = True,
    ) -> None:
        super().__init__(index, token_to_piece, include_logprobs, include_token_ids)
        self._parser, self._thinking, self._with_thoughts = tool_parser, reasoning_parser, include_reasoning
        self._content, self._thoughts, self.reasoning_tokens = "", "", 0
        self._calls: list[dict[str, Any]] = []
        self._begun = False

    def empty_chunk(self) -> dict[str, Any]:
        return {"index": self._index, "finish_reason": None, "delta": {}}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        text, finish = delta.text, FINISH_REASONS.get(delta.finish_reason)
        if self._thinking is not None and (text or finish):
            thought, text = self._thinking.push(text, last=finish is not None)
            self.reasoning_tokens += len(delta.token_ids) * bool(self._thinking.in_reasoning or thought)
            parts = [{"reasoning_content": thought}] if thought and self._with_thoughts else []
        if text:
            parts += [{"content": text}] if self._parser is None else self._parser.push(text)
        if finish is not None and self._parser is not None:
            rest, reason = self._parser.finish(cut=delta.finish_reason != "eos")
            parts += rest
            finish = reason or finish
        ids = self._added(delta)
        if not parts and (delta.logprobs or ids or finish):
            parts = [{}]
        self._finish = finish
        chunks = []
        for i, part in enumerate(parts):
            self._keep(part)
            first = {} if self._begun else {"role": "assistant", "content": ""}
            self._begun = True
            chunk = self.empty_chunk() | {"delta": first | part}
            if self._with_log_probs:
                chunk["logprobs"] = self._log_probs(delta.logprobs if i == 0 else ())
            chunks.append(chunk | (ids if i == 0 else {}))
        if chunks:
            chunks[-1]["finish_reason"] = finish
        return chunks

    def _keep(self, part: dict[str, Any]) -> None:
        self._content += part.get("content", "")
        self._thoughts += part.get("reasoning_content", "")
        for call in part.get("tool_calls", ()):
            if "id" in call:
                kind = call["type"]
                self._calls.append({"id": call["id"], "type": kind, kind: dict(call[kind])})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def full_choice(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": self._calls}
        if self._thoughts:
            message["reasoning_content"] = self._thoughts
        logprobs = self._log_probs(self._scored) if self._with_log_probs else None
        return self._with_ids(
            {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}
        )

    def _log_probs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._token(s.token_id, s.logprob) | {"top_logprobs": [self._token(*best) for best in s.top_logprobs]}
            for s in scored
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        assert logprob is not None  # that of a prompt's first token, which chats do not repeat
        text, content = self._piece(token)
        return {"token": text, "logprob": round(logprob, 6), "bytes": list(content)}


class CompletionChoiceBuilder(ChoiceBuilder):
    """Builds one choice of ``/v1/completions``."""

    object_type, chunk_object_type, id_prefix = "text_completion", "text_completion", "cmpl"
    _text = ""

    def empty_chunk(self) -> dict[str, Any]:
        return {"index": self._index, "finish_reason": None, "text": ""}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        offset = len(self._text)
        self._text += delta.text
        self._finish = FINISH_REASONS.get(delta.finish_reason)
        ids = self._added(delta)
        if not (delta.text or delta.logprobs or ids or delta.finish_reason):
            return []
        return [self._choice(delta.text, delta.logprobs, offset) | ids]

    def full_choice(self) -> dict[str, Any]:
        return self._with_ids(self._choice(self._text, self._scored, 0))

    def _choice(self, text: str, scored: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """``offset``: how many characters come before the text."""
        logprobs = None
        if self._with_log_probs:
            tokens = [self._piece(s.token_id)[0] for s in scored]
            lengths = [0 if token.startswith(PARTIAL_CHAR_PREFIX) else len(token) for token in tokens]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [None if s.logprob is None else round(s.logprob, 6) for s in scored],
                "top_logprobs": [
                    None if s.logprob is None else {self._piece(token)[0]: round(x, 6) for token, x in s.top_logprobs}
                    for s in scored
                ],
                "text_offset": list(accumulate(lengths[:-1], initial=offset)) if tokens else [],
            }
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self._finish}


def usage(choices: Sequence[Choice], reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage object of answers that have ended, with draft statistics; ``reasoning_tokens`` tokens were thoughts."""
    cached = sum(max(c.result.cached_tokens if c.result else 0 for c in each) for each in _by_prompt(choices))
    return usage_so_far(choices) | {
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "speculation": sum((choice.spec_stats for choice in choices), SpecDecodingStats()).as_dict(),
    }


def _by_prompt(choices: Sequence[Choice]) -> list[list[Choice]]:
    """The answers to each prompt, which share its tokens."""
    return [list(each) for _, each in groupby(choices, key=lambda choice: id(choice.request.prompt))]


def timings_and_metrics(choice: Choice) -> dict[str, Any]:
    """The figures of an answer that has ended where clients of vLLM look, and those of llama.cpp."""
    result, spec = choice.result, choice.spec_stats
    if result is None:
        return {}
    read, new = result.prompt_tokens - result.cached_tokens, result.new_tokens
    first = min(choice.first_token_time or choice.end_time, choice.end_time)  # it is heard of after it came
    reading, decoding = 1e3 * (first - choice.arrival_time), 1e3 * (choice.end_time - first)
    timings = {
        "cache_n": result.cached_tokens, **_timed("prompt", read, reading), **_timed("predicted", new, decoding),
    }  # fmt: skip
    if not spec.num_drafts:
        return {"timings": timings}
    timings |= {"draft_n": spec.num_draft_tokens, "draft_n_accepted": spec.num_accepted_tokens}
    return {"timings": timings, "metrics": {"speculative_decoding": spec.as_vllm()}}


def _timed(name: str, tokens: int, milliseconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / tokens if tokens else 0.0,
        f"{name}_per_second": 1e3 * tokens / milliseconds if milliseconds > 0 else 0.0,
    }


def usage_so_far(choices: Sequence[Choice]) -> dict[str, int]:
    """The token counts of answers in progress."""
    prompt, new = sum(len(each[0].request.prompt) for each in _by_prompt(choices)), sum(c.num_tokens for c in choices)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
