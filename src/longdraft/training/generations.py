"""The target's own answers as training text, and beside them what a draft reads of the target."""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from longdraft.errors import CheckpointError, ContextError
from longdraft.memory.prompt_cache import common_prefix
from longdraft.model.chat import chat_prompt, follow_up
from longdraft.model.runner import TargetRunner
from longdraft.training.branches import Branches, Said, sample
from longdraft.training.kept_features import KeptFeatures
from longdraft.training.prompts import Ask

# Passages in a row of which none fits the context before we say so.
PATIENCE = 100
# An answer that begins like an earlier one to the same passage is dropped.
SAME = 32
# Text that repeats a piece of at most PERIOD tokens for so long goes on for ever: the answer ends there.
PERIOD, LOOP = 32, 96


@dataclass
class _Answer:
    """One answer in the making.

    Attributes:
        forced: tokens that are fed next, whatever the target says.
        start: how many tokens its question has. turns: what the user says next, as tokens.
        tokens: those fed so far, behind the passage. said: how many the target has said in this turn.
        ends: what is fed next is its last token.
    """

    forced: deque[int]
    start: int
    turns: deque[list[int]]
    temperature: float
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    said: int = 0
    ends: bool = False


@dataclass
class _Group:
    """A passage and the answers to it.

    Attributes:
        number: of the passage. prefix: its tokens. passage: what the target computed for it.
        waiting, flying, done: answers: to be begun; by the row they are decoded in; with what the target computed.
        begun: how the answers begin.
    """

    number: int
    prefix: list[int]
    waiting: deque[_Answer]
    passage: Said | None = None
    flying: dict[int, _Answer] = field(default_factory=dict)
    done: list[tuple[_Answer, Said | None]] = field(default_factory=list)
    begun: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def coming(self) -> int:
        """Answers that it has or may still have."""
        return len(self.waiting) + len(self.flying) + len(self.done)

    def shorten(self, most: int) -> None:
        """Leaves the first so many of the answers that wait."""
        while len(self.waiting) > most:
            self.waiting.pop()


def generate(
    runner: TargetRunner,
    tokenizer: PreTrainedTokenizerBase,
    passages: Iterator[list[Ask]],
    out: Path,
    *,
    places: int,
    per_passage: int,
    max_new_tokens: int,
    total: int,
    seed: int = 0,
    features: KeptFeatures | None = None,
    progress: Callable[[int, int], None] = lambda rows, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Lets the target answer prompts, many at a time, and appends a row an answer to a JSONL file.

    A row has ``tokens`` (prompt and answer, the answer's end-of-sequence token included), ``start`` (where the answer
    starts), ``temperature``, ``text`` (the answer) and ``at`` (its passage, its number there, and how many answers the
    passage has). A passage's answers are written together, so a run that was killed goes on with the passages that are
    missing. What it samples for a passage depends on ``seed`` alone, up to rounding: rows beside a row change its last
    bits.

    An answer ends with the target's end of sequence, after ``max_new_tokens``, or when it repeats itself; one that
    begins like another to the same passage is dropped.

    Args:
        passages: prompts, those of a passage together. Those too long for the context are left out.
        out: the file; made if it is not there.
        places: passages at a time. per_passage: answers to each at a time.
        max_new_tokens: of a turn.
        total: rows to have in the end. The last passage gets as many answers as are missing.
        features: where to keep what drafts read of the target.
        progress: told the rows there are and the tokens answered by this run, whenever rows were written.
        stop: asked between steps; True ends the run, and passages that are not finished are not written.

    Returns:
        How many rows the file has.

    Raises:
        ContextError: none of the prompts fits the context.
        CheckpointError: the file cannot be written, holds something else, or has answers whose features were not kept.
        MemoryBudgetError: the KV of so many answers does not fit.
        NumericalError: the target returned NaN.
    """
    try:
        rows, done, end = _have(out)
        if features and (lacking := features.lacking(done)):
            raise CheckpointError(
                f"{out} has answers to {len(lacking)} passages whose features are not in {features.folder}. Name "
                "another file, or go on without features."
            )
        if rows >= total:
            return rows
        own = max_new_tokens * 2 + 64
        layers, top = (features.layers, features.top) if features else ((), 0)
        run = _Run(Branches(runner, places, per_passage, own, layers, top), max_new_tokens, runner.eos_token_ids)
        groups = _groups(runner, tokenizer, passages, done, own, max_new_tokens, seed)
        answered = 0
        while (rows < total or run.groups) and not stop():
            for place in range(places):
                missing = total - rows - run.coming
                if place not in run.groups and missing > 0 and (found := next(groups, None)):
                    found.shorten(missing)
                    run.begin(place, found)
            if not run.groups:
                break
            for group in run.step():
                if features and group.passage:
                    features.write(group.number, group.passage, [said for _, said in group.done if said])
                made = _rows(group, tokenizer)
                end = _append(out, end, made)
                rows += len(made)
                answered += sum(len(row["tokens"]) - row["start"] for row in made)
                progress(rows, answered)
        return rows
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{out} cannot be written: {error}. What is there is kept.") from error


class _Run:
    """The groups that are decoded, a token each a step."""

    def __init__(self, branches: Branches, max_new_tokens: int, ends: frozenset[int]) -> None:
        self.branches, self.max_new_tokens, self.ends = branches, max_new_tokens, ends
        self.groups: dict[int, _Group] = {}

    @property
    def coming(self) -> int:
        """Answers of the groups that are decoded."""
        return sum(group.coming for group in self.groups.values())

    def begin(self, place: int, group: _Group) -> None:
        """Reads a passage into a place."""
        self.groups[place] = group
        group.passage = self.branches.read(place, group.prefix)
        for row in range(place * self.branches.per_passage, (place + 1) * self.branches.per_passage):
            self._seat(group, row)

    def _seat(self, group: _Group, row: int) -> None:
        """The next answer that waits takes a row, in the place of the one that was there."""
        group.flying.pop(row, None)
        if group.waiting:
            group.flying[row] = group.waiting.popleft()
            self.branches.begin(row)

    def step(self) -> list[_Group]:
        """A token more of every answer; returns the groups that are complete now."""
        groups = [group for _, group in sorted(self.groups.items())]
        flying = [(row, answer, group) for group in groups for row, answer in sorted(group.flying.items())]
        for _, answer, _ in flying:
            answer.tokens.append(answer.forced.popleft())
        logits = self.branches.step([row for row, *_ in flying], [answer.tokens[-1] for _, answer, _ in flying])
        chance = [(answer.temperature, answer.rng.random()) for _, answer, _ in flying]
        temperatures, uniform = torch.tensor(chance, dtype=torch.float64, device=logits.device).T
        for (row, answer, group), token in zip(flying, sample(logits, temperatures, uniform).tolist(), strict=True):
            if answer.ends:
                group.done.append((answer, self.branches.said(row, answer.tokens) if self.branches.top else None))
                self._seat(group, row)
            elif not answer.forced and not self._goes_on(group, answer, token):
                self._seat(group, row)
        complete = [place for place, group in self.groups.items() if not group.flying]
        return [self.groups.pop(place) for place in complete]

    def _goes_on(self, group: _Group, answer: _Answer, token: int) -> bool:
        """Takes what the target said; False where the answer is dropped."""
        answer.said += 1
        over = token in self.ends
        if over and answer.turns:
            answer.forced.extend(answer.turns.popleft())
            answer.said = 0
            return True
        answer.forced.append(token)
        own = answer.tokens[answer.start :]
        answer.ends = over or answer.said >= self.max_new_tokens or looping(own)
        if len(own) == SAME and not answer.turns:
            if tuple(own) in group.begun:
                return False
            group.begun.add(tuple(own))
        return True


def looping(tokens: Sequence[int]) -> bool:
    """Whether the last ``LOOP`` tokens repeat a piece of at most ``PERIOD``; looked at now and then."""
    if len(tokens) % 16 or len(tokens) < LOOP:
        return False
    last = tokens[-LOOP:]
    return any(last[period:] == last[:-period] for period in range(1, PERIOD + 1))


def _groups(
    runner: TargetRunner,
    tokenizer: PreTrainedTokenizerBase,
    passages: Iterator[list[Ask]],
    done: set[int],
    own: int,
    max_new_tokens: int,
    seed: int,
) -> Iterator[_Group]:
    """The passages that are to be asked about, with the answers to them that fit."""
    limit, unfit = runner.context_length, 0
    for number, asked in enumerate(passages):
        if number in done:
            continue
        prompts = [chat_prompt(tokenizer, ask.text) for ask in asked]
        shared = min(len(p) for p in prompts) - 1
        for prompt in prompts:
            shared = common_prefix(prompts[0][:shared], prompt)
        answers = deque[_Answer]()
        for ask, prompt in zip(asked, prompts, strict=True):
            question = prompt[shared:]
            turns = deque(tokens for text in ask.then if (tokens := follow_up(tokenizer, text)))
            whole = len(question) + sum(map(len, turns)) + (len(turns) + 1) * max_new_tokens
            while turns and whole > own:
                whole -= len(turns.pop()) + max_new_tokens
            if whole <= own and shared + whole <= limit:
                rng = random.Random(f"{seed}/{number}/{len(answers)}")
                answers.append(_Answer(deque(question), len(question), turns, ask.temperature, rng))
        if answers and shared:
            unfit = 0
            yield _Group(number, prompts[0][:shared], answers)
        elif (unfit := unfit + 1) == PATIENCE:
            raise ContextError(
                f"No prompt fits the model's context of {limit} tokens with {max_new_tokens} new ones: ask about "
                "shorter passages, or for shorter answers."
            )


def _rows(group: _Group, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    return [
        {
            "tokens": group.prefix + answer.tokens,
            "start": len(group.prefix) + answer.start,
            "temperature": answer.temperature,
            "text": tokenizer.decode(answer.tokens[answer.start :], skip_special_tokens=True),
            "at": [group.number, place, len(group.done)],
        }
        for place, (answer, _) in enumerate(group.done)
    ]


def _append(path: Path, end: int, rows: list[dict[str, Any]]) -> int:
    """Cuts a file to its first ``end`` bytes, writes rows behind them, and returns how long it is then."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(end)
        file.seek(end)
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _have(out: Path) -> tuple[int, set[int], int]:
    """Rows of whole passages in a file, those passages' numbers, and how many bytes they take.

    Raises:
        CheckpointError: the file does not begin with such rows: it is not ours to cut.
    """
    rows, end, done = 0, 0, set[int]()
    if out.exists():
        with out.open("rb") as file:
            at = 0
            for count, line in enumerate(file, 1):
                at += len(line)
                try:
                    number, place, size = json.loads(line)["at"]
                except (ValueError, KeyError, TypeError) as error:
                    if count == 1 and line.endswith(b"\n"):
                        raise CheckpointError(f"{out} holds something else: name another file.") from error
                    break
                if line.endswith(b"\n") and place == size - 1:
                    rows, end = count, at
                    done.add(int(number))
    return rows, done, end
