"""OpenAI's response objects, and their streams of chunks."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Any

from longdraft.serve.choice import FINISH_REASONS, Choice, Delta, SpecDecodingStats
from longdraft.serve.processors import TokenLogprob
from longdraft.serve.reasoning import ReasoningParser
from longdraft.serve.tool_parser import ToolParser

DONE_EVENT = "data: [DONE]\n\n"
# Begins OpenAI's notation for a token that is a partial UTF-8 character.
PARTIAL_CHAR_PREFIX = "bytes:"


def sse_event(content: Any, name: str | None = None) -> str:
    """Returns a server-sent event with JSON content."""
    event_line = f"event: {name}\n" if name else ""
    return f"{event_line}data: {json.dumps(content, ensure_ascii=False)}\n\n"


class ResponseEnvelope:
    """The fields that all chunks of a response share."""

    def __init__(self, id_prefix: str, model: str) -> None:
        self.id = f"{id_prefix}-{secrets.token_hex(12)}"
        self.model, self.created = model, int(time.time())

    def wrap(self, object_type: str, choices: list[dict[str, Any]], **extra_fields: Any) -> dict[str, Any]:
        envelope = {"id": self.id, "object": object_type, "created": self.created, "model": self.model}
        return {**envelope, "choices": choices, **extra_fields}


class ChoiceBuilder(ABC):
    """Builds the JSON of one choice, complete or in chunks. ``token_to_piece``: returns a token's text and bytes."""

    object_type: str  # "object" of the full response
    chunk_object_type: str  # "object" of a chunk
    id_prefix: str  # of the response id

    def __init__(
        self, index: int, token_to_piece: Callable[[int], tuple[str, bytes]], include_logprobs: bool,
        include_token_ids: bool,
    ) -> None:  # fmt: skip
        self._index, self._token_to_piece, self._include_logprobs = index, token_to_piece, include_logprobs
        self._token_ids: list[int] | None = [] if include_token_ids else None
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None

    @abstractmethod
    def empty_chunk(self) -> dict[str, Any]:
        """Returns an entry of a chunk's ``choices`` without text."""

    @abstractmethod
    def build_choice_entries(self, delta: Delta) -> list[dict[str, Any]]:
        """Returns the ``choices`` entry of each chunk for a delta; [] if there is nothing to report."""

    @abstractmethod
    def full_choice(self) -> dict[str, Any]:
        """Returns the complete ``choices`` entry. Call it after the last :meth:`build_choice_entries`."""

    def _add_tokens(self, delta: Delta) -> dict[str, Any]:
        """Records a delta's tokens. Returns {"token_ids": ...} for the chunk, or {} if none are new or requested."""
        self._logprobs += delta.logprobs
        if self._token_ids is None or not delta.token_ids:
            return {}
        self._token_ids += delta.token_ids
        return {"token_ids": list(delta.token_ids)}

    def _with_token_ids(self, choice_json: dict[str, Any]) -> dict[str, Any]:
        return choice_json if self._token_ids is None else choice_json | {"token_ids": self._token_ids}


class ChatChoiceBuilder(ChoiceBuilder):
    """Builds one choice of ``/v1/chat/completions``.

    Args:
        tool_parser: separates tool calls from text; None if the model may call no tools.
        reasoning_parser: separates reasoning from the answer; None leaves the reasoning in the text.
        include_reasoning: report ``reasoning_content``.

    Attributes:
        reasoning_tokens: number of tokens so far that are reasoning.
    """

    object_type, chunk_object_type, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, *args: Any, tool_parser: ToolParser | None = None, reasoning_parser: ReasoningParser | None = None,
        include_reasoning: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(*args)
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._include_reasoning, self.reasoning_tokens = include_reasoning, 0
        self._content, self._reasoning, self._role_sent = "", "", False
        self._tool_calls: list[dict[str, Any]] = []

    def empty_chunk(self) -> dict[str, Any]:
        return {"index": self._index, "finish_reason": None, "delta": {}}

    def build_choice_entries(self, delta: Delta) -> list[dict[str, Any]]:
        message_deltas: list[dict[str, Any]] = []
        text, finish_reason = delta.text, FINISH_REASONS.get(delta.finish_reason)
        if self._reasoning_parser is not None and (text or finish_reason):
            reasoning, text = self._reasoning_parser.push(text, last=finish_reason is not None)
            if self._reasoning_parser.in_reasoning or reasoning:
                self.reasoning_tokens += len(delta.token_ids)
            message_deltas = [{"reasoning_content": reasoning}] if reasoning and self._include_reasoning else []
        if text:
            message_deltas += [{"content": text}] if self._tool_parser is None else self._tool_parser.push(text)
        if finish_reason is not None and self._tool_parser is not None:
            last_deltas, tool_reason = self._tool_parser.finish(truncated=delta.finish_reason != "eos")
            message_deltas += last_deltas
            finish_reason = tool_reason or finish_reason
        token_ids = self._add_tokens(delta)
        if not message_deltas and (delta.logprobs or token_ids or finish_reason):
            message_deltas = [{}]  # a chunk without text, for the other fields
        self._finish_reason = finish_reason
        chunks = []
        for i, message_delta in enumerate(message_deltas):  # the first has the log-probabilities and token ids
            self._add_message_delta(message_delta)
            role = {} if self._role_sent else {"role": "assistant", "content": ""}
            self._role_sent = True
            chunk = self.empty_chunk() | {"delta": role | message_delta}
            if self._include_logprobs:
                chunk["logprobs"] = self._logprobs_object(delta.logprobs if i == 0 else ())
            chunks.append(chunk | (token_ids if i == 0 else {}))
        if chunks:
            chunks[-1]["finish_reason"] = finish_reason
        return chunks

    def _add_message_delta(self, message_delta: dict[str, Any]) -> None:
        """Adds a delta to the complete message."""
        self._content += message_delta.get("content", "")
        self._reasoning += message_delta.get("reasoning_content", "")
        for call in message_delta.get("tool_calls", ()):
            if "id" in call:
                call_type = call["type"]
                self._tool_calls.append({"id": call["id"], "type": call_type, call_type: dict(call[call_type])})
            else:
                self._tool_calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def full_choice(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._tool_calls:
            message |= {"content": self._content or None, "tool_calls": self._tool_calls}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        logprobs = self._logprobs_object(self._logprobs) if self._include_logprobs else None
        entry = {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}
        return self._with_token_ids(entry)

    def _logprobs_object(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for token in logprobs:
            top_logprobs = [self._token_object(*top) for top in token.top_logprobs]
            content.append(self._token_object(token.token_id, token.logprob) | {"top_logprobs": top_logprobs})
        return {"content": content, "refusal": None}

    def _token_object(self, token: int, logprob: float | None) -> dict[str, Any]:
        assert logprob is not None  # only the first token of an echoed prompt has none, and chats have no echo
        text, content = self._token_to_piece(token)
        return {"token": text, "logprob": round(logprob, 6), "bytes": list(content)}


class CompletionChoiceBuilder(ChoiceBuilder):
    """Builds one choice of ``/v1/completions``."""

    object_type, chunk_object_type, id_prefix = "text_completion", "text_completion", "cmpl"
    _text = ""  # the choice's text so far

    def empty_chunk(self) -> dict[str, Any]:
        return {"index": self._index, "finish_reason": None, "text": ""}

    def build_choice_entries(self, delta: Delta) -> list[dict[str, Any]]:
        offset = len(self._text)
        self._text += delta.text
        self._finish_reason = FINISH_REASONS.get(delta.finish_reason)
        token_ids = self._add_tokens(delta)
        if not (delta.text or delta.logprobs or token_ids or delta.finish_reason):
            return []
        return [self._choice(delta.text, delta.logprobs, offset) | token_ids]

    def full_choice(self) -> dict[str, Any]:
        return self._with_token_ids(self._choice(self._text, self._logprobs, 0))

    def _choice(self, text: str, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Returns a ``choices`` entry. ``offset``: number of characters of the choice before ``text``."""
        logprobs_object = None
        if self._include_logprobs:
            tokens = [self._token_to_piece(x.token_id)[0] for x in logprobs]
            # A partial character adds nothing to the text until the character is complete.
            lengths = [0 if token.startswith(PARTIAL_CHAR_PREFIX) else len(token) for token in tokens]
            logprobs_object = {
                "tokens": tokens,
                "token_logprobs": [None if x.logprob is None else round(x.logprob, 6) for x in logprobs],
                "top_logprobs": [self._top_logprobs(x) for x in logprobs],
                "text_offset": list(accumulate(lengths[:-1], initial=offset)) if tokens else [],
            }
        return {"index": self._index, "text": text, "logprobs": logprobs_object, "finish_reason": self._finish_reason}

    def _top_logprobs(self, token_logprob: TokenLogprob) -> dict[str, float] | None:
        if token_logprob.logprob is None:
            return None
        return {self._token_to_piece(token)[0]: round(logprob, 6) for token, logprob in token_logprob.top_logprobs}


def usage(choices: Sequence[Choice], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Returns OpenAI's usage object of choices that have ended, with draft statistics."""
    cached_tokens = sum(max(c.result.cached_tokens if c.result else 0 for c in group) for group in _by_prompt(choices))
    return usage_so_far(choices) | {
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "speculation": sum((choice.spec_stats for choice in choices), SpecDecodingStats()).as_dict(),
    }


def _by_prompt(choices: Sequence[Choice]) -> list[list[Choice]]:
    """Groups choices by prompt. The ``n`` choices of a prompt share one list of token ids, which usage counts once."""
    return [list(group) for _, group in groupby(choices, key=lambda choice: id(choice.request.prompt))]


def timings_and_metrics(choice: Choice) -> dict[str, Any]:
    """Returns llama.cpp's field ``timings`` and vLLM's ``metrics`` for a choice that has ended."""
    result, stats = choice.result, choice.spec_stats
    if result is None:
        return {}
    # first_token_time is when the event loop learned of the token, which may be after the engine's end_time.
    first_token_time = min(choice.first_token_time or choice.end_time, choice.end_time)
    prefill_ms, decode_ms = 1e3 * (first_token_time - choice.arrival_time), 1e3 * (choice.end_time - first_token_time)
    timings = {
        "cache_n": result.cached_tokens,
        **_timings("prompt", result.prompt_tokens - result.cached_tokens, prefill_ms),
        **_timings("predicted", result.new_tokens, decode_ms),
    }
    if not stats.num_drafts:
        return {"timings": timings}
    timings |= {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}
    return {"timings": timings, "metrics": {"speculative_decoding": stats.as_vllm()}}


def _timings(phase: str, num_tokens: int, milliseconds: float) -> dict[str, float]:
    return {
        f"{phase}_n": num_tokens, f"{phase}_ms": milliseconds,
        f"{phase}_per_token_ms": milliseconds / num_tokens if num_tokens else 0.0,
        f"{phase}_per_second": 1e3 * num_tokens / milliseconds if milliseconds > 0 else 0.0,
    }  # fmt: skip


def usage_so_far(choices: Sequence[Choice]) -> dict[str, int]:
    """Returns the token counts of choices in progress."""
    prompt_tokens = sum(len(group[0].request.prompt) for group in _by_prompt(choices))
    new_tokens = sum(choice.num_reported_tokens for choice in choices)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": prompt_tokens + new_tokens}
