"""OpenAI's response objects, whole or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

from longdraft.serve.calls import ToolParser
from longdraft.serve.choice import REASONS, Choice, Delta, ScoredToken, Speculation
from longdraft.serve.thinking import Thinking

DONE = "data: [DONE]\n\n"
# How OpenAI's API begins the name of a token that is a part of a character.
PART = "bytes:"


def event(content: Any, name: str | None = None) -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class Head:
    """The fields that all chunks of a response share."""

    def __init__(self, prefix: str, model: str) -> None:
        self.id, self.prefix = f"{prefix}-{secrets.token_hex(12)}", prefix
        self.model, self.created = model, int(time.time())

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


class Answer(ABC):
    """Builds one choice of a response.

    Args:
        piece: token id to text and bytes. with_log_probs, with_ids: report log-probabilities, and token ids.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self, index: int, piece: Callable[[int], tuple[str, bytes]], with_log_probs: bool, with_ids: bool
    ) -> None:
        self._index, self._piece, self._with_log_probs = index, piece, with_log_probs
        self._ids: list[int] | None = [] if with_ids else None
        self._scored: list[ScoredToken] = []
        self._finish: str | None = None

    @abstractmethod
    def empty_chunk(self) -> dict[str, Any]:
        """The choice of a chunk that adds nothing."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for what a step adds."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The choice of an answer that has ended."""

    def _added(self, delta: Delta) -> dict[str, Any]:
        """Keeps what a step adds of tokens; the field of a chunk's token ids, if there are any and they are wanted."""
        self._scored += delta.scored
        if self._ids is None or not delta.token_ids:
            return {}
        self._ids += delta.token_ids
        return {"token_ids": list(delta.token_ids)}

    def _with_ids(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice if self._ids is None else choice | {"token_ids": self._ids}


class ChatAnswer(Answer):
    """Builds one choice of ``/v1/chat/completions``.

    Args:
        parser: separates tool calls from text; None if the model may call no tools.
        thinking: separates what the model thinks from what it says; None: it stays in the text.
        with_thoughts: report what it thinks.

    Attributes:
        thought_tokens: how many tokens it has thought.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        index: int,
        piece: Callable[[int], tuple[str, bytes]],
        with_log_probs: bool,
        with_ids: bool,
        parser: ToolParser | None = None,
        thinking: Thinking | None = None,
        with_thoughts: bool = True,
    ) -> None:
        super().__init__(index, piece, with_log_probs, with_ids)
        self._parser, self._thinking, self._with_thoughts = parser, thinking, with_thoughts
        self._content, self._thoughts, self.thought_tokens = "", "", 0
        self._calls: list[dict[str, Any]] = []
        self._begun = False

    def empty_chunk(self) -> dict[str, Any]:
        return {"index": self._index, "finish_reason": None, "delta": {}}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        text, finish = delta.text, REASONS.get(delta.finish)
        if self._thinking is not None and (text or finish):
            thought, text = self._thinking.push(text, last=finish is not None)
            self.thought_tokens += len(delta.token_ids) * bool(self._thinking.inside or thought)
            parts = [{"reasoning_content": thought}] if thought and self._with_thoughts else []
        if text:
            parts += [{"content": text}] if self._parser is None else self._parser.push(text)
        if finish is not None and self._parser is not None:
            rest, reason = self._parser.finish(cut=delta.finish != "eos")
            parts += rest
            finish = reason or finish
        ids = self._added(delta)
        if not parts and (delta.scored or ids or finish):
            parts = [{}]
        self._finish = finish
        chunks = []
        for i, part in enumerate(parts):
            self._keep(part)
            first = {} if self._begun else {"role": "assistant", "content": ""}
            self._begun = True
            chunk = self.empty_chunk() | {"delta": first | part}
            if self._with_log_probs:
                chunk["logprobs"] = self._log_probs(delta.scored if i == 0 else ())
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

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": self._calls}
        if self._thoughts:
            message["reasoning_content"] = self._thoughts
        log_probs = self._log_probs(self._scored) if self._with_log_probs else None
        return self._with_ids(
            {"index": self._index, "message": message, "logprobs": log_probs, "finish_reason": self._finish}
        )

    def _log_probs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = [
            self._token(s.token, s.log_prob) | {"top_logprobs": [self._token(*best) for best in s.best]} for s in scored
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, log_prob: float | None) -> dict[str, Any]:
        assert log_prob is not None  # that of a prompt's first token, which chats do not repeat
        text, content = self._piece(token)
        return {"token": text, "logprob": round(log_prob, 6), "bytes": list(content)}


class TextAnswer(Answer):
    """Builds one choice of ``/v1/completions``."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    _text = ""

    def empty_chunk(self) -> dict[str, Any]:
        return {"index": self._index, "finish_reason": None, "text": ""}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        offset = len(self._text)
        self._text += delta.text
        self._finish = REASONS.get(delta.finish)
        ids = self._added(delta)
        if not (delta.text or delta.scored or ids or delta.finish):
            return []
        return [self._choice(delta.text, delta.scored, offset) | ids]

    def whole(self) -> dict[str, Any]:
        return self._with_ids(self._choice(self._text, self._scored, 0))

    def _choice(self, text: str, scored: Sequence[ScoredToken], offset: int) -> dict[str, Any]:
        """``offset``: how many characters come before the text."""
        log_probs = None
        if self._with_log_probs:
            tokens = [self._piece(s.token)[0] for s in scored]
            lengths = [0 if token.startswith(PART) else len(token) for token in tokens]
            log_probs = {
                "tokens": tokens,
                "token_logprobs": [None if s.log_prob is None else round(s.log_prob, 6) for s in scored],
                "top_logprobs": [
                    None if s.log_prob is None else {self._piece(token)[0]: round(x, 6) for token, x in s.best}
                    for s in scored
                ],
                "text_offset": list(accumulate(lengths[:-1], initial=offset)) if tokens else [],
            }
        return {"index": self._index, "text": text, "logprobs": log_probs, "finish_reason": self._finish}


def usage(choices: Sequence[Choice], thought: int = 0) -> dict[str, Any]:
    """OpenAI's usage object of answers that have ended, with draft statistics; ``thought`` tokens were thoughts."""
    cached = sum(max(c.result.cached_tokens if c.result else 0 for c in each) for each in _by_prompt(choices))
    return usage_so_far(choices) | {
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
        "speculation": sum((choice.speculation for choice in choices), Speculation()).as_dict(),
    }


def _by_prompt(choices: Sequence[Choice]) -> list[list[Choice]]:
    """The answers to each prompt, which share its tokens."""
    return [list(each) for _, each in groupby(choices, key=lambda choice: id(choice.request.prompt))]


def as_others(choice: Choice) -> dict[str, Any]:
    """The figures of an answer that has ended where clients of vLLM look, and those of llama.cpp."""
    result, spec = choice.result, choice.speculation
    if result is None:
        return {}
    read, new = result.prompt_tokens - result.cached_tokens, result.new_tokens
    first = min(choice.first_token or choice.ended, choice.ended)  # it is heard of after it came
    reading, decoding = 1e3 * (first - choice.arrived), 1e3 * (choice.ended - first)
    timings = {
        "cache_n": result.cached_tokens, **_timed("prompt", read, reading), **_timed("predicted", new, decoding),
    }  # fmt: skip
    if not spec.drafts:
        return {"timings": timings}
    timings |= {"draft_n": spec.drafted, "draft_n_accepted": spec.accepted}
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
    prompt, new = sum(len(each[0].request.prompt) for each in _by_prompt(choices)), sum(c.tokens for c in choices)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
