"""The target's answers as training text: their file, and those of a model in this process."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longdraft.engine.request import Request
from longdraft.errors import CheckpointError, ContextError, PromptError, reason_of
from longdraft.files import naming, regular
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.chat import chat_prompt, follow_up
from longdraft.speculator import Speculator
from longdraft.training.prompts import Ask

# After so many prompts in a row without an answer, nothing more is asked.
PATIENCE = 32
# An answer that was cut off ends where its last LOOP tokens begin to repeat a piece of at most PERIOD tokens.
PERIOD, LOOP = 32, 96
# Bytes of KV that are kept of passages, so that the next prompt about one does not read it again.
SHARED = 1 << 30

Asks = Iterator[tuple[int, list[Ask]]]
Row = dict[str, Any]


class AnswerFile:
    """A JSONL file of answers, to which rows are appended as they come. What an earlier run has written is kept.

    Args:
        holds: what its rows hold. ``at`` of a row is its passage, its number there, and how many the passage has.

    Attributes:
        rows: in the file. added: tokens of the answers that this run has added.
        done: (passage, number) of each row.
        shares: tokens of all answers, by ``source`` (the text's file or corpus) and by ``kind`` (of the prompt).
        usage: tokens that a server reports to have read and written, for all answers.

    Raises:
        CheckpointError: the file cannot be read, or holds something else, so it must not be cut.
    """

    def __init__(self, path: Path, holds: Literal["tokens", "messages"]) -> None:
        self.path, self.holds = path, holds
        self.rows = self.added = self._end = 0
        self.done: set[tuple[int, int]] = set()
        self.shares: dict[str, Counter[str]] = {"source": Counter(), "kind": Counter()}
        self.usage = [0, 0]
        if not path.exists():
            return
        with naming(regular(path), f"{path} cannot be read", "Name another file."):
            lines = path.read_bytes().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break  # torn
            try:
                self._count(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path} holds something else (at byte {self._end}): name another file."
                ) from error
            self._end += len(line)

    def append(self, row: Row) -> None:
        """Writes a row at the end, where a torn one may have been. Raises CheckpointError if that fails."""
        try:
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                file.truncate(self._end)
                file.seek(self._end)
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
                self._end = file.tell()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error}. What is there is kept.") from error
        self.added += self._count(row)

    def _count(self, row: Row) -> int:
        """Counts a row; returns the tokens of its answer."""
        number, place, _ = row["at"]
        tokens: int = row["usage"][1] if self.holds == "messages" else len(row["tokens"]) - row["start"]
        self.done.add((number, place))
        self.rows += 1
        for name, share in self.shares.items():
            share[row.get(name, "")] += tokens
        self.usage = [a + b for a, b in zip(self.usage, row.get("usage", (0, 0)), strict=True)]
        return tokens

    def missing(self, passages: Asks) -> Iterator[tuple[list[int], Ask]]:
        """The prompts that have no row, each with its place."""
        for number, asks in passages:
            for place, ask in enumerate(asks):
                if (number, place) not in self.done:
                    yield [number, place, len(asks)], ask

    @property
    def tokens(self) -> int:
        """Tokens of all answers in the file."""
        return self.shares["source"].total()


class Refused:
    """Counts the prompts without an answer. Raises PromptError if there are :data:`PATIENCE` of them in a row."""

    def __init__(self, file: AnswerFile, who: str) -> None:
        self.count = self._in_a_row = 0
        self._file, self._who = file, who

    def answered(self) -> None:
        self._in_a_row = 0

    def add(self, reason: str) -> None:
        self.count, self._in_a_row = self.count + 1, self._in_a_row + 1
        if self._in_a_row == PATIENCE:
            raise PromptError(
                f"{PATIENCE} prompts in a row got no answer from {self._who} ({reason}): ask about shorter passages. "
                f"{kept(self._file)}"
            )


def kept(file: AnswerFile) -> str:
    return f"The answers in {file.path} are kept; the same command continues from there."


@dataclass
class _Conversation:
    """A prompt that is being answered.

    Attributes:
        tokens: so far. start: the first answer's first token. turns: what the user says next.
    """

    at: list[int]
    ask: Ask
    tokens: list[int]
    start: int = 0
    turns: deque[str] = field(default_factory=deque)


def answer(
    spec: Speculator,
    passages: Asks,
    file: AnswerFile,
    *,
    batch: int,
    max_new_tokens: int,
    total: int,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Lets a target answer prompts, and appends a row for each as its answer ends.

    A row has ``tokens`` (prompt and answer, the answer's end-of-sequence token included), ``start`` (the answer's first
    token), ``temperature``, ``text`` (the answer), ``source`` and ``kind`` (of its prompt) and ``at`` (its passage, its
    number there, and how many prompts the passage has). A killed run continues with the missing ones.

    Args:
        spec: the target with its tokenizer.
        passages: numbers of passages, and the prompts about each.
        batch: answers decoded at a time. max_new_tokens: tokens of a turn. total: rows that the file has in the end.
        seed: of sampling, with the prompt's place.
        progress: called whenever a row is written.
        stop: called between steps; True ends the run, and unfinished answers are not written.

    Returns:
        How many prompts were too long for the context.

    Raises:
        PromptError: prompt after prompt is too long.
        CheckpointError: the file cannot be written.
        MemoryBudgetError, NumericalError: as a session does.
    """
    tokenizer = spec.tokenizer
    assert tokenizer is not None
    session = spec.session(batch, cache=PromptCache(tree_bytes=SHARED))
    going: dict[int, _Conversation] = {}
    missing, refused = file.missing(passages), Refused(file, "the target")

    def ask(conversation: _Conversation, tokens: list[int]) -> None:
        number, place, _ = conversation.at
        own = random.Random(f"{seed}/{number}/{place}").getrandbits(31)
        request = Request(tokens, max_new_tokens, seed=own, temperature=conversation.ask.temperature)
        going[session.add(request)] = conversation
        conversation.tokens = tokens

    def further(conversation: _Conversation) -> bool:
        """Asks the next turn, if there is one and the template and the context have a place for it."""
        turn = follow_up(tokenizer, conversation.turns.popleft()) if conversation.turns else []
        try:
            if turn:
                ask(conversation, conversation.tokens[:-1] + turn)  # which begins with the answer's end
        except ContextError:
            return False
        return bool(turn)

    while not stop():
        while len(going) < min(batch, total - file.rows) and (following := next(missing, None)):
            at, asked = following
            try:
                tokens = chat_prompt(tokenizer, asked.text)
                ask(_Conversation(at, asked, tokens, len(tokens), deque(asked.then)), tokens)
            except (ContextError, PromptError) as error:
                refused.add(reason_of(error))
        if not going:
            break
        session.step()
        for number in filter(session.ended, list(going)):
            result, conversation = session.take(number), going.pop(number)
            conversation.tokens = conversation.tokens + unlooped(result.token_ids)
            if result.finish_reason == "eos" and further(conversation):
                continue
            refused.answered()
            file.append(
                {
                    "tokens": conversation.tokens,
                    "start": conversation.start,
                    "temperature": conversation.ask.temperature,
                    "text": tokenizer.decode(conversation.tokens[conversation.start :], skip_special_tokens=True),
                    "source": conversation.ask.source,
                    "kind": conversation.ask.kind,
                    "at": conversation.at,
                }
            )
            progress()
    session.close()
    return refused.count


def unlooped(tokens: list[int]) -> list[int]:
    """An answer without the end in which it says the same over and over."""
    for period in range(1, PERIOD + 1):
        if len(tokens) > LOOP and tokens[-LOOP:][period:] == tokens[-LOOP:-period]:
            end = len(tokens)
            while end > period and tokens[end - 1] == tokens[end - 1 - period]:
                end -= 1
            return tokens[:end]
    return tokens
