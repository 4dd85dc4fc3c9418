"""The target's answers as training text: their file, and those of a model in this process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from longdraft.engine.request import Request
from longdraft.errors import ContextError, PromptError, reason_of
from longdraft.json_lines import JsonLines
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.chat import chat_prompt
from longdraft.speculator import Speculator
from longdraft.training.prompts import Ask

# After so many prompts in a row without an answer, nothing more is asked.
PATIENCE = 32
# An answer that was cut off ends where its last LOOP tokens begin to repeat a piece of at most PERIOD tokens.
PERIOD, LOOP = 32, 96
# Bytes of KV that are kept of passages, so that the next prompt about one does not read it again.
SHARED = 1 << 30

Asks = Iterator[tuple[int, list[Ask]]]
# The passage, the prompt's number there, and how many the passage has.
At = list[int]
Row = dict[str, Any]


class AnswerFile:
    """A JSONL file of answers, to which rows are appended as they come. What an earlier run has written is kept.

    Args:
        holds: what its rows hold: ``tokens`` (prompt and answer, the answer's end-of-sequence token included) and
            ``start`` (the answer's first token) and ``text`` (the answer), as a model here writes them; or
            ``messages``, ``cut`` (the answer was longer than allowed) and ``usage`` (tokens that the server reports to
            have read and written). All have ``temperature``, ``source``, ``kind`` (of the prompt) and ``at`` (its
            passage, its number there, and how many prompts the passage has).
        total: rows that it has in the end. who: answers, in messages.

    Attributes:
        added: tokens of the answers that this run has added. refused: prompts without an answer.
        done: (passage, number) of each row.
        shares: tokens of all answers, by ``source`` (the text's file or corpus) and by ``kind`` (of the prompt).
        usage: tokens that a server reports to have read and written, for all answers.

    Raises:
        CheckpointError: the file cannot be read, or holds something else, so it must not be cut.
    """

    def __init__(
        self, path: Path, holds: Literal["tokens", "messages"], total: int = 1 << 60, who: str = "the target"
    ) -> None:
        self.path, self.holds, self.total, self.who = path, holds, total, who
        self.added = self.refused = self._in_a_row = 0
        self.done: set[tuple[int, int]] = set()
        self.shares: dict[str, Counter[str]] = {"source": Counter(), "kind": Counter()}
        self.usage = [0, 0]
        self._file = JsonLines(path, lambda number, row: self._count(row))

    def append(self, row: Row) -> None:
        """Writes a row at the end, where a torn one may have been. Raises CheckpointError if that fails."""
        self._file.append(row)
        self.added += self._count(row)
        self._in_a_row = 0

    def refuse(self, reason: str) -> None:
        """Counts a prompt without an answer. Raises PromptError if there are :data:`PATIENCE` of them in a row."""
        self.refused, self._in_a_row = self.refused + 1, self._in_a_row + 1
        if self._in_a_row == PATIENCE:
            raise PromptError(
                f"{PATIENCE} prompts in a row got no answer from {self.who} ({reason}): ask about shorter passages. "
                f"{self.kept}"
            )

    def missing(self, passages: Asks) -> Iterator[tuple[At, Ask]]:
        """The prompts that have no row, each with its place."""
        for number, asks in passages:
            for place, ask in enumerate(asks):
                if (number, place) not in self.done:
                    yield [number, place, len(asks)], ask

    def _count(self, row: Row) -> int:
        """Counts a row; returns the tokens of its answer."""
        number, place, _ = row["at"]
        tokens: int = row["usage"][1] if self.holds == "messages" else len(row["tokens"]) - row["start"]
        self.done.add((number, place))
        for name, share in self.shares.items():
            share[row.get(name, "")] += tokens
        self.usage = [a + b for a, b in zip(self.usage, row.get("usage", (0, 0)), strict=True)]
        return tokens

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return self._file.count

    @property
    def tokens(self) -> int:
        """Tokens of all answers in the file."""
        return self.shares["source"].total()

    @property
    def kept(self) -> str:
        return f"The answers in {self.path} are kept; the same command continues from there."


def answer(
    spec: Speculator,
    passages: Asks,
    file: AnswerFile,
    *,
    batch: int,
    max_new_tokens: int,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Lets a target answer prompts, and appends a row for each as its answer ends.

    A killed run continues with the missing ones.

    Args:
        spec: the target with its tokenizer.
        passages: numbers of passages, and the prompts about each.
        batch: answers decoded at a time. seed: of sampling, with the prompt's place.
        progress: called whenever a row is written.
        stop: called between steps; True ends the run, and unfinished answers are not written.

    Raises:
        PromptError: prompt after prompt is too long.
        CheckpointError: the file cannot be written.
        MemoryBudgetError, NumericalError: as a session does.
    """
    tokenizer = spec.tokenizer
    assert tokenizer is not None
    session, missing = spec.session(batch, cache=PromptCache(tree_bytes=SHARED)), file.missing(passages)
    going: dict[int, tuple[At, Ask, list[int]]] = {}
    while not stop():
        while len(going) < min(batch, file.total - file.rows) and (following := next(missing, None)):
            at, ask = following
            own = random.Random(f"{seed}/{at[0]}/{at[1]}").getrandbits(31)
            try:
                prompt = chat_prompt(tokenizer, ask.text)
                number = session.add(Request(prompt, max_new_tokens, seed=own, temperature=ask.temperature))
                going[number] = at, ask, prompt
            except (ContextError, PromptError) as error:
                file.refuse(reason_of(error))
        if not going:
            break
        session.step()
        for number in filter(session.ended, list(going)):
            (at, ask, prompt), said = going.pop(number), unlooped(session.take(number).token_ids)
            text = tokenizer.decode(said, skip_special_tokens=True)
            file.append({"tokens": prompt + said, "start": len(prompt), "text": text, **about(at, ask)})
            progress()
    session.close()


def unlooped(tokens: list[int]) -> list[int]:
    """An answer without the end in which it says the same over and over."""
    for period in range(1, PERIOD + 1):
        if len(tokens) > LOOP and tokens[-LOOP:][period:] == tokens[-LOOP:-period]:
            end = len(tokens)
            while end > period and tokens[end - 1] == tokens[end - 1 - period]:
                end -= 1
            return tokens[:end]
    return tokens


def about(at: At, ask: Ask) -> Row:
    """Entries of a row that say how its answer came about."""
    return {"temperature": ask.temperature, "source": ask.source, "kind": ask.kind, "at": at}
