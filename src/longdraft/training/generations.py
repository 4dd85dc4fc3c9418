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
from longdraft.host.chat import chat_prompt, follow_up
from longdraft.host.runner import TargetRunner
from longdraft.kv.prompt_cache import common_prefix
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
        number: within its group. row: where it is decoded.
        forced: tokens that are fed next, whatever the target says.
        tokens: of its own so far, fed ones; start: how many of them were the question.
        turns: what the user says next, as tokens. said: tokens of this turn.
    """

    number: int
    row: int
    forced: deque[int]
    start: int
    turns: deque[list[int]]
    temperature: float
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    said: int = 0
    ends: bool = False


class _Group:
    """A passage and the answers to it, in one place of the batch."""

    def __init__(self, number: int, place: int, prefix: list[int], waiting: list[_Answer]) -> None:
        self.number, self.place, self.prefix = number, place, prefix
        self.waiting, self.flying = deque(waiting), dict[int, _Answer]()
        self.done: list[tuple[_Answer, Said | None]] = []
        self.begun: set[tuple[int, ...]] = set()
        self.passage: Said | None = None


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
        total: rows to have in the end, or a few more.
        features: where to keep what drafts read of the target.
        progress: told the rows there are and the tokens answered by this run, whenever rows were written.
        stop: asked between steps; True ends the run, and passages that are not finished are not written.

    Returns:
        How many rows the file has.

    Raises:
        ContextError: none of the prompts fits the context.
        CheckpointError: the file cannot be written.
    """
    try:
        rows, done, end = _have(out)
        if rows >= total:
            return rows
        own = max_new_tokens * 2 + 64
        layers, top = (features.layers, features.top) if features else ((), 0)
        branches = Branches(runner, places, per_passage, own, layers, top)
        groups = _groups(runner, tokenizer, passages, done, own, max_new_tokens, seed)
        run = _Run(branches, max_new_tokens, runner.eos_token_ids)
        answered = 0
        while (rows < total or run.groups) and not stop():
            for place in range(places):
                if place not in run.groups and rows < total and (found := next(groups, None)):
                    run.begin(place, *found)
            if not run.groups:
                break
            for group in run.step():
                made = [_row(group, answer, tokenizer) for answer, _ in group.done]
                if features:
                    features.write(group.number, group.passage, [said for _, said in group.done])
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

    def begin(self, place: int, number: int, prefix: list[int], answers: list[_Answer]) -> None:
        """Reads a passage into a place."""
        group = self.groups[place] = _Group(number, place, prefix, answers)
        group.passage = self.branches.read(place, prefix)
        for row in range(place * self.branches.per_passage, (place + 1) * self.branches.per_passage):
            self._seat(group, row)

    def _seat(self, group: _Group, row: int) -> None:
        group.flying.pop(row, None)
        if group.waiting:
            answer = group.flying[row] = group.waiting.popleft()
            answer.row = row
            self.branches.begin(row)

    def step(self) -> list[_Group]:
        """A token more of every answer; returns the groups that are complete now."""
        groups = [group for _, group in sorted(self.groups.items())]
        flying = [(row, answer, group) for group in groups for row, answer in sorted(group.flying.items())]
        rows = [row for row, *_ in flying]
        for _, answer, _ in flying:
            answer.tokens.append(answer.forced.popleft())
        logits = self.branches.step(rows, [answer.tokens[-1] for _, answer, _ in flying])
        heat = torch.tensor([a.temperature for _, a, _ in flying])
        luck = torch.tensor([a.rng.random() for _, a, _ in flying])
        for (row, answer, group), token in zip(flying, sample(logits, heat, luck).tolist(), strict=True):
            if answer.ends:
                group.done.append((answer, self.branches.said(row, answer.tokens) if self.branches.top else None))
                self._seat(group, row)
            elif not answer.forced and not self._goes_on(group, answer, token):
                self._seat(group, row)
        complete = [group for group in self.groups.values() if not group.flying]
        for group in complete:
            del self.groups[group.place]
        return complete

    def _goes_on(self, group: _Group, answer: _Answer, token: int) -> bool:
        """Takes what the target said; False where the answer is dropped."""
        answer.said += 1
        over = token in self.ends
        if over and answer.turns:
            answer.forced.extend(answer.turns.popleft())
            answer.said = 0
            return True
        answer.forced.append(token)
        answer.ends = over or answer.said >= self.max_new_tokens or looping(answer.tokens)
        if len(answer.tokens) - answer.start == SAME and not answer.turns:
            beginning = tuple(answer.tokens[answer.start :])
            if beginning in group.begun:
                return False
            group.begun.add(beginning)
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
) -> Iterator[tuple[int, list[int], list[_Answer]]]:
    """Number, common beginning and answers of each passage that is to be asked about."""
    limit, unfit = runner.context_length, 0
    for number, asked in enumerate(passages):
        if number in done:
            continue
        prompts = [chat_prompt(tokenizer, ask.text) for ask in asked]
        shared = min(len(p) for p in prompts) - 1
        for prompt in prompts:
            shared = common_prefix(prompts[0][:shared], prompt)
        answers: list[_Answer] = []
        for ask, prompt in zip(asked, prompts, strict=True):
            turns = deque(follow_up(tokenizer, text) for text in ask.then)
            question = prompt[shared:]
            whole = len(question) + sum(map(len, turns)) + (len(turns) + 1) * max_new_tokens
            while turns and whole > own:
                whole -= len(turns.pop()) + max_new_tokens
            if whole <= own and shared + whole <= limit:
                rng = random.Random(f"{seed}/{number}/{len(answers)}")
                forced = deque(question)
                answers.append(_Answer(len(answers), -1, forced, len(question), turns, ask.temperature, rng))
        if answers and shared:
            unfit = 0
            yield number, prompts[0][:shared], answers
        elif (unfit := unfit + 1) == PATIENCE:
            raise ContextError(
                f"No prompt fits the model's context of {limit} tokens with {max_new_tokens} new ones: ask about "
                "shorter passages, or for shorter answers."
            )


def _row(group: _Group, answer: _Answer, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    place = next(i for i, (each, _) in enumerate(group.done) if each is answer)
    text = tokenizer.decode(answer.tokens[answer.start :], skip_special_tokens=True)
    row = {"tokens": group.prefix + answer.tokens, "start": len(group.prefix) + answer.start}
    return row | {"temperature": answer.temperature, "text": text, "at": [group.number, place, len(group.done)]}


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
    """Rows of whole passages in a file, those passages' numbers, and how many bytes they take."""
    rows, end, done = 0, 0, set[int]()
    if out.exists():
        with out.open("rb") as file:
            at, count = 0, 0
            for line in file:
                at, count = at + len(line), count + 1
                try:
                    group, place, size = json.loads(line)["at"]
                except (ValueError, KeyError, TypeError):
                    break
                if line.endswith(b"\n") and place == size - 1:
                    rows, end = count, at
                    done.add(int(group))
    return rows, done, end
