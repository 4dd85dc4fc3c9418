"""The target's own answers as training text, and with them the features that a draft reads."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from longdraft.errors import CheckpointError, ContextError
from longdraft.memory.token_ids import common_prefix
from longdraft.model.chat import chat_prompt, follow_up
from longdraft.model.ends import ends_of
from longdraft.model.runner import TargetRunner
from longdraft.training.answer_file import AnswerFile
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
        ask: its prompt. number: among its passage's. forced: tokens that are fed next, whatever the target predicts.
        start: number of tokens of its question. turns: what the user says next, as tokens.
        tokens: those fed so far, after the passage. sampled: how many of them the target has sampled in this turn.
        ends: the next token is its last.
    """

    ask: Ask
    number: int
    forced: deque[int]
    start: int
    turns: deque[list[int]]
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    sampled: int = 0
    ends: bool = False


@dataclass
class _Group:
    """A passage and the answers to it.

    Attributes:
        number: number of the passage. prefix: its tokens. features: its features if they are kept.
        waiting: answers that have no row yet. running: how many have one. done: finished answers with their features.
        beginnings: the first tokens of answers.
    """

    number: int
    prefix: list[int]
    waiting: deque[_Answer]
    features: TokenFeatures | None = None
    running: int = 0
    done: list[tuple[_Answer, TokenFeatures | None]] = field(default_factory=list)
    beginnings: set[tuple[int, ...]] = field(default_factory=set)


def generate(
    runner: TargetRunner,
    tokenizer: PreTrainedTokenizerBase,
    passages: Iterator[tuple[int, list[Ask]]],
    file: AnswerFile,
    *,
    batch: int,
    places: int,
    max_new_tokens: int,
    total: int,
    seed: int = 0,
    features: KeptFeatures | None = None,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Lets the target answer prompts, many at a time, and appends a row for each answer to a JSONL file.

    A row has ``tokens`` (prompt and answer, the answer's end-of-sequence token included), ``start`` (the answer's first
    token), ``temperature``, ``text`` (the answer), ``source`` and ``kind`` (of its prompt) and ``at`` (its passage, its
    number there, and how many answers the passage has). A passage's answers are written together, so a killed run
    continues with the missing passages. The answers to a passage depend on ``seed`` alone, up to rounding: rows beside
    a row change its last bits.

    Answers join and leave between two steps: a row that is free goes to the next prompt, of whatever passage. An answer
    ends with the target's end of sequence, after ``max_new_tokens``, or when it repeats itself. Of answers to a passage
    that begin alike, the first to get so far is kept.

    Args:
        passages: numbers of passages, and the prompts about each. Prompts too long for the context are left out.
        batch: answers at a time. places: passages at a time, at most.
        max_new_tokens: tokens of a turn.
        total: rows that the file has in the end. The last passage gets as many answers as are missing.
        features: where features are kept.
        progress: called whenever rows are written.
        stop: called between steps; True ends the run, and unfinished passages are not written.

    Raises:
        ContextError: none of the prompts fits the context.
        CheckpointError: the file cannot be written, or has answers whose features were not kept.
        MemoryBudgetError: the KV of so many answers does not fit.
        NumericalError: the target returned NaN.
    """
    done = {number for number, _ in file.done}
    if features and (lacking := features.lacking(done)):
        raise CheckpointError(
            f"{file.path} has answers to {len(lacking)} passages whose features are not in {features.folder}. Name "
            "another file, or continue without features."
        )
    if file.rows >= total:
        return
    capacity = max_new_tokens * 2 + 64
    branches = Branches(runner, batch, capacity, features.layers if features else None)
    groups = _groups(runner, tokenizer, passages, done, capacity, max_new_tokens, seed)
    decoding = _Decoding(branches, groups, batch, places, max_new_tokens, runner.eos_token_ids | ends_of(tokenizer))
    while not stop() and decoding.fill(total - file.rows):
        for group in decoding.step():
            if features and group.features:
                features.write(group.number, group.features, [kept for _, kept in group.done if kept])
            file.append(_rows(group, tokenizer))
            progress()


class _Decoding:
    """The answers that are being decoded, by row; each step decodes a token of each.

    Args:
        coming: the passages to be answered. rows: answers at a time. places: passages at a time, at most.
    """

    def __init__(
        self,
        branches: Branches,
        coming: Iterator[_Group],
        rows: int,
        places: int,
        max_new_tokens: int,
        eos: frozenset[int],
    ) -> None:
        self.branches, self.coming, self.places = branches, coming, places
        self.max_new_tokens, self.eos = max_new_tokens, eos
        self.groups: list[_Group] = []
        self.running: dict[int, tuple[_Group, _Answer]] = {}
        self.free = deque(range(rows))

    def fill(self, missing: int) -> bool:
        """Gives free rows to answers that wait, the oldest passage's first, and begins further passages.

        Args:
            missing: answers that are wanted, those of begun passages included.

        Returns:
            False if there is nothing to decode.
        """
        missing -= sum(len(group.waiting) + group.running + len(group.done) for group in self.groups)
        while self.free:
            group = next((group for group in self.groups if group.waiting), None)
            if group is None:
                if missing <= 0 or len(self.groups) == self.places or not (group := next(self.coming, None)):
                    break
                while len(group.waiting) > missing:
                    group.waiting.pop()
                missing -= len(group.waiting)
                group.features = self.branches.read(group.number, group.prefix)
                self.groups.append(group)
            row = self.free.popleft()
            self.branches.clear(row)
            self.running[row] = group, group.waiting.popleft()
            group.running += 1
        return bool(self.running)

    def step(self) -> list[_Group]:
        """Decodes a token of every answer; returns the passages that are now complete."""
        running = sorted(self.running.items(), key=lambda item: item[1][0].number)  # a passage's rows together
        for _, (_, answer) in running:
            answer.tokens.append(answer.forced.popleft())
        rows, numbers, tokens = zip(
            *((row, group.number, answer.tokens[-1]) for row, (group, answer) in running), strict=True
        )
        logits = self.branches.step(rows, numbers, tokens)
        chance = [(answer.ask.temperature, answer.rng.random()) for _, (_, answer) in running]
        temperatures, uniform = torch.tensor(chance, dtype=torch.float64, device=logits.device).T
        sampled = sample(logits, temperatures, uniform).tolist()
        for (row, (group, answer)), token in zip(running, sampled, strict=True):
            if answer.ends:
                kept = self.branches.features(row, answer.tokens) if self.branches.keeps else None
                group.done.append((answer, kept))
            elif answer.forced or self._take(group, answer, token):
                continue
            del self.running[row]
            self.free.append(row)
            group.running -= 1
        complete = [group for group in self.groups if not group.running and not group.waiting]
        for group in complete:
            self.groups.remove(group)
            group.done.sort(key=lambda item: item[0].number)
            self.branches.forget(group.number)
        return complete

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
    passages: Iterator[tuple[int, list[Ask]]],
    done: set[int],
    capacity: int,
    max_new_tokens: int,
    seed: int,
) -> Iterator[_Group]:
    """The passages that are not done, each with its answers that fit: into ``capacity`` tokens and into the context."""
    limit, too_long = runner.context_length, 0
    for number, asks in passages:
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
                answers.append(_Answer(ask, len(answers), deque(question), len(question), turns, rng))
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
            "temperature": answer.ask.temperature,
            "text": tokenizer.decode(answer.tokens[answer.start :], skip_special_tokens=True),
            "source": answer.ask.source,
            "kind": answer.ask.kind,
            "at": [group.number, place, len(group.done)],
        }
        for place, (answer, _) in enumerate(group.done)
    ]
