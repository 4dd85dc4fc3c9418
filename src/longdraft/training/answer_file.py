"""A JSONL file of answers that grows as they come, and goes on after a kill."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from longdraft.errors import CheckpointError


class AnswerFile:
    """Answers to prompts about passages, a row each. What an earlier run has written is kept.

    Rows of ``tokens`` come passage by passage, so a file that ends within a passage is cut off before it. Rows of
    ``messages`` come one by one, so at most a torn line is cut off.

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
        whole: list[dict[str, Any]] = []
        for row, end in self._read():
            _, place, size = row["at"]
            whole.append(row)
            if holds == "messages" or place == size - 1:
                self._count(whole)
                self._end, whole = end, []

    def _read(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Each row with the offset of its end, up to the first that is torn."""
        end = 0
        try:
            with self.path.open("rb") as file:
                for line in file:
                    end += len(line)
                    if not line.endswith(b"\n"):
                        return
                    try:
                        row = json.loads(line)
                        _number, _place, _size = row["at"]
                        _tokens = row["start"] if self.holds == "tokens" else row["usage"][1]
                    except (ValueError, KeyError, TypeError) as error:
                        raise CheckpointError(
                            f"{self.path} holds something else (at byte {end - len(line)}): name another file."
                        ) from error
                    yield row, end
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}.") from error

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes rows at the end, where a torn one may have been. Raises CheckpointError if that fails."""
        try:
            with self.path.open("r+b" if self.path.exists() else "wb") as file:
                file.truncate(self._end)
                file.seek(self._end)
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
                file.flush()
                os.fsync(file.fileno())
                self._end = file.tell()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error}. What is there is kept.") from error
        self.added += self._count(rows)

    def _count(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Counts rows; returns the tokens of their answers."""
        before = self.tokens
        for row in rows:
            number, place, _ = row["at"]
            self.done.add((number, place))
            self.rows += 1
            tokens = row["usage"][1] if self.holds == "messages" else len(row["tokens"]) - row["start"]
            for name, share in self.shares.items():
                share[row.get(name, "")] += tokens
            self.usage = [a + b for a, b in zip(self.usage, row.get("usage", (0, 0)), strict=True)]
        return self.tokens - before

    @property
    def tokens(self) -> int:
        """Tokens of all answers in the file."""
        return self.shares["source"].total()
