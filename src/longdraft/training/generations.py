"""The target's own answers as training text, and with them the features that a draft reads."""

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

from longdraft.errors import CheckpointError, ContextError, LongdraftError
from longdraft.memory.token_ids import common_prefix
from longdraft.model.chat import chat_prompt, follow_up
from longdraft.model.runner import TargetRunner
from longdraft.training.branches import Branches, TokenFeatures, sample
from longdraft.training.kept_features import KeptFeatures
from longdraft.training.prompts import Ask

# After so many passages in a row that do not fit the context, generate gives up.
PATIENCE = 100
# An answer is dropped if its first tokens, so many, are those of another answer to the same passage.
SAME = 32
# An answer ends if its last LOOP tokens repeat a piece of at most PERIOD tokens.
PERIOD, LOOP = 32, 96


@dataclass
class _Answer:
    """An unfinished answer.

    Attributes:
        forced: tokens that are fed next, whatever the target predicts.
        start: number of tokens of its question. turns: what the user says next, as tokens.
        tokens: those fed so far, after the passage. sampled: how many of them the target has sampled in this turn.
        ends: the next token is its last.
    """

    forced: deque[int]
    start: int
    turns: deque[list[int]]
    temperature: float
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    sampled: int = 0
    ends: bool = False


@dataclass
class _Group:
    """A passage and the answers to it.

    Attributes:
        number: number of the passage. prefix: its tokens. features: its features if they are kept.
        waiting: answers that have no row yet. running: answers by the row they are decoded in. done: finished answers
            with their features.
        beginnings: the first tokens of answers.
    """

    number: int
    prefix: list[int]
    waiting: deque[_Answer]
    features: TokenFeatures | None = None
    running: dict[int, _Answer] = field(default_factory=dict)
    done: list[tuple[_Answer, TokenFeatures | None]] = field(default_factory=list)
    beginnings: set[tuple[int, ...]] = field(default_factory=set)


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
    """Lets the target answer prompts, many at a time, and appends a row for each answer to a JSONL file.

    A row has ``tokens`` (prompt and answer, the answer's end-of-sequence token included), ``start`` (the answer's first
    token), ``temperature``, ``text`` (the answer) and ``at`` (its passage, its number there, and how many answers the
    passage has). A passage's answers are written together, so a killed run continues with the missing passages. The
    answers to a passage depend on ``seed`` alone, up to rounding: rows beside a row change its last bits.

    An answer ends with the target's end of sequence, after ``max_new_tokens``, or when it repeats itself. One that
    begins like another answer to the same passage is dropped.

    Args:
        passages: prompts, those about a passage together. Prompts too long for the context are left out.
        places: passages at a time. per_passage: answers to each at a time.
        max_new_tokens: tokens of a turn.
        total: rows that the file has in the end. The last passage gets as many answers as are missing.
        features: where features are kept.
        progress: called with the rows in the file and the tokens answered by this run, whenever rows are written.
        stop: called between steps; True ends the run, and unfinished passages are not written.

    Returns:
        The number of rows in the file.

    Raises:
        ContextError: none of the prompts fits the context.
        CheckpointError: the file cannot be written, holds something else, or has answers whose features were not kept.
        MemoryBudgetError: the KV of so many answers does not fit.
        NumericalError: the target returned NaN.
    """
    try:
        rows, done, end = _read(out)
        if features and (lacking := features.lacking(done)):
            raise CheckpointError(
                f"{out} has answers to {len(lacking)} passages whose features are not in {features.folder}. Name "
                "another file, or continue without features."
            )
        if rows >= total:
            return rows
        capacity = max_new_tokens * 2 + 64
        layers, top = (features.layers, features.top) if features else ((), 0)
        decoding = _Decoding(
            Branches(runner, places, per_passage, capacity, layers, top), max_new_tokens, runner.eos_token_ids
        )
        groups = _groups(runner, tokenizer, passages, done, capacity, max_new_tokens, seed)
        answered = 0
        while (rows < total or decoding.groups) and not stop():
            for place in range(places):
                missing = total - rows - decoding.answers
                if place not in decoding.groups and missing > 0 and (group := next(groups, None)):
                    while len(group.waiting) > missing:
                        group.waiting.pop()
                    decoding.begin(place, group)
            if not decoding.groups:
                break
            for group in decoding.step():
                if features and group.features:
                    features.write(group.number, group.features, [kept for _, kept in group.done if kept])
                written = _rows(group, tokenizer)
                end = _append(out, end, written)
                rows += len(written)
                answered += sum(len(row["tokens"]) - row["start"] for row in written)
                progress(rows, answered)
        return rows
    except LongdraftError:
        raise
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}. What is there is kept.") from error


class _Decoding:
    """The groups that are being decoded, by place; each step decodes a token of each answer."""

    def __init__(self, branches: Branches, max_new_tokens: int, eos: frozenset[int]) -> None:
        self.branches, self.max_new_tokens, self.eos = branches, max_new_tokens, eos
        self.groups: dict[int, _Group] = {}

    @property
    def answers(self) -> int:
        """Answers that the groups have or may still get."""
        return sum(len(group.waiting) + len(group.running) + len(group.done) for group in self.groups.values())

    def begin(self, place: int, group: _Group) -> None:
        self.groups[place] = group
        group.features = self.branches.read(place, group.prefix)
        for row in range(place * self.branches.per_passage, (place + 1) * self.branches.per_passage):
            self._replace(group, row)

    def _replace(self, group: _Group, row: int) -> None:
        """Gives the row to the next answer that waits."""
        group.running.pop(row, None)
        if group.waiting:
            group.running[row] = group.waiting.popleft()
            self.branches.clear(row)

    def step(self) -> list[_Group]:
        """Decodes a token of every answer; returns the groups that are now complete."""
        groups = [group for _, group in sorted(self.groups.items())]
        running = [(row, answer, group) for group in groups for row, answer in sorted(group.running.items())]
        for _, answer, _ in running:
            answer.tokens.append(answer.forced.popleft())
        logits = self.branches.step([row for row, *_ in running], [answer.tokens[-1] for _, answer, _ in running])
        chance = [(answer.temperature, answer.rng.random()) for _, answer, _ in running]
        temperatures, uniform = torch.tensor(chance, dtype=torch.float64, device=logits.device).T
        for (row, answer, group), token in zip(running, sample(logits, temperatures, uniform).tolist(), strict=True):
            if answer.ends:
                kept = self.branches.features(row, answer.tokens) if self.branches.top else None
                group.done.append((answer, kept))
                self._replace(group, row)
            elif not answer.forced and not self._take(group, answer, token):
                self._replace(group, row)
        complete = [place for place, group in self.groups.items() if not group.running]
        return [self.groups.pop(place) for place in complete]

    def _take(self, group: _Group, answer: _Answer, token: int) -> bool:
        """Adds a sampled token to an answer; False if the answer is to be dropped."""
        answer.sampled += 1
        if token in self.eos and answer.turns:
            answer.forced.extend(answer.turns.popleft())
            answer.sampled = 0
            return True
        answer.forced.append(token)
        text = answer.tokens[answer.start :]
        answer.ends = token in self.eos or answer.sampled >= self.max_new_tokens or looping(text)
        if len(text) == SAME and not answer.turns:
            if tuple(text) in group.beginnings:
                return False
            group.beginnings.add(tuple(text))
        return True


def looping(tokens: Sequence[int]) -> bool:
    """True if the last ``LOOP`` tokens repeat a piece of at most ``PERIOD``; checked at every 16th token."""
    if len(tokens) % 16 or len(tokens) < LOOP:
        return False
    last = tokens[-LOOP:]
    return any(last[period:] == last[:-period] for period in range(1, PERIOD + 1))


def _groups(
    runner: TargetRunner,
    tokenizer: PreTrainedTokenizerBase,
    passages: Iterator[list[Ask]],
    done: set[int],
    capacity: int,
    max_new_tokens: int,
    seed: int,
) -> Iterator[_Group]:
    """The passages that are not done, each with its answers that fit: into ``capacity`` tokens and into the context."""
    limit, too_long = runner.context_length, 0
    for number, asks in enumerate(passages):
        if number in done:
            continue
        prompts = [chat_prompt(tokenizer, ask.text) for ask in asks]
        shared = min(len(p) for p in prompts) - 1
        for prompt in prompts:
            shared = common_prefix(prompts[0][:shared], prompt)
        answers = deque[_Answer]()
        for ask, prompt in zip(asks, prompts, strict=True):
            question = prompt[shared:]
            turns = deque(tokens for text in ask.then if (tokens := follow_up(tokenizer, text)))
            length = len(question) + sum(map(len, turns)) + (len(turns) + 1) * max_new_tokens
            while turns and length > capacity:
                length -= len(turns.pop()) + max_new_tokens
            if length <= capacity and shared + length <= limit:
                rng = random.Random(f"{seed}/{number}/{len(answers)}")
                answers.append(_Answer(deque(question), len(question), turns, ask.temperature, rng))
        if answers and shared:
            too_long = 0
            yield _Group(number, prompts[0][:shared], answers)
        elif (too_long := too_long + 1) == PATIENCE:
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
    """Cuts a file to its first ``end`` bytes, appends rows, and returns its length in bytes."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(end)
        file.seek(end)
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _read(out: Path) -> tuple[int, set[int], int]:
    """The rows of complete passages in a file, those passages' numbers, and the bytes they take.

    Raises:
        CheckpointError: the file does not begin with such a row, so it must not be cut.
    """
    rows, end, done, read = 0, 0, set[int](), 0
    if not out.exists():
        return rows, done, end
    with out.open("rb") as file:
        for count, line in enumerate(file, 1):
            read += len(line)
            try:
                number, place, size = json.loads(line)["at"]
            except (ValueError, KeyError, TypeError) as error:
                if count == 1 and line.endswith(b"\n"):
                    raise CheckpointError(f"{out} holds something else: name another file.") from error
                break
            if line.endswith(b"\n") and place == size - 1:
                rows, end = count, read
                done.add(int(number))
    return rows, done, end
