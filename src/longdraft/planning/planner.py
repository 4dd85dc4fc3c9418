"""The planner: how much to draft and to verify, round by round, for the most tokens per second.

Everything has a price in time, and time one in tokens: lambda, the tokens that decoding makes in a second. A tree whose
nodes have chances p_1 >= p_2 >= ... of being accepted emits 1 + sum p_i tokens in V(1 + n) seconds, so the best n
maximises sum_{i <= n} p_i - lambda * V(1 + n). One more level of drafting pays while it promises more tokens than
lambda times the seconds of a draft forward. Chances are the drafter's probabilities, corrected by what became of nodes
like these; V is measured. Where all of it brings less than plain decoding, nothing is drafted for a while.

A batch that nobody joins ends when its slowest text does. There a token is worth what the text's last step will cost,
which it saves: little for a text that ends while many are left, a whole step of its own for the last (:class:`Ends`).

What is emitted does not depend on any of this: any tree verifies exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from math import exp

from longdraft.events import Event
from longdraft.planning.calibration import Calibration
from longdraft.planning.costs import Costs, CostTable
from longdraft.planning.gate import Gate
from longdraft.sequence import Sequence
from longdraft.trees.budget import Budget
from longdraft.trees.tree import TokenTree

# Every so many rounds one is plain, which says what plain decoding costs now.
_PROBE = 64
# A draft forward, in plain steps, before one was seen; how fast estimates follow.
_FORWARD, _FOLLOW = 0.05, 0.2
# A gain smaller than this, in plain steps, is not believed: chances and costs are estimates, and wrong by as much.
_MARGIN = 0.04
# Rounds of one token that a text of a batch is credited with: its own first rounds say little.
_USUAL = 8


class Planner:
    """What is known of a method on a target: costs, and what became of its drafts. Serves one run after another.

    Args:
        table: what verifications cost.
    """

    def __init__(self, table: CostTable) -> None:
        self.costs = Costs(table)
        # Drawn text is accepted by other chances than greedy text, and by smaller ones.
        self.calibrations = {greedy: Calibration() for greedy in (True, False)}
        self.gates = {greedy: Gate(doubtful=not greedy) for greedy in (True, False)}
        self.forward: float | None = None  # seconds of a draft forward
        self.chosen = 8.0  # nodes lately worth verifying

    def start(self, greedy: bool, batch: int = 1) -> Plan:
        """Plans a run of so many sequences. In a batch rows are dear, and a trial should be short."""
        self.gates[greedy].begin(doubtful=batch > 1)
        return Plan(self, self.calibrations[greedy], self.gates[greedy])


class Plan:
    """Plans the rounds of one run: each asks for a budget, then what is worth verifying, and says how it went."""

    def __init__(self, planner: Planner, calibration: Calibration, gate: Gate) -> None:
        self._planner, self._costs = planner, planner.costs
        self._calibration, self._gate = calibration, gate
        self._rounds = 0
        self._speculating = False
        self._ends = Ends()

    def budget(self, sequences: SequenceOf[Sequence]) -> Budget | None:
        """What this round's trees may be; None: nothing shall be drafted, to see what that costs."""
        self._begun = time.perf_counter()
        self._lengths = [len(s.prompt) + len(s.output) for s in sequences]
        self._plain = self._costs.verification(1, self._lengths)
        self._indices = [s.index for s in sequences]
        steps = [self._costs.verification(1, self._lengths[:n]) for n in range(1, len(sequences))]
        self._shares = self._ends.shares([(s.index, s.remaining) for s in sequences], [*steps, self._plain])
        probing = self._rounds % _PROBE == 0
        self._rounds += 1
        self._speculating = not probing and self._gate.open()
        # In a batch every sequence pays for the rows of all others: a closed gate stops lookups too.
        if probing or (len(sequences) > 1 and not self._speculating):
            return None
        forward = self._planner.forward or _FORWARD * self._plain
        node = max(0.0, self._costs.verification(2, self._lengths) - self._plain)
        price = self._worth * (forward + node) / len(sequences) / self._calibration.trust
        return Budget(nodes=2 * round(self._planner.chosen) + 2, price=price, paid=self._speculating)

    @property
    def _worth(self) -> float:
        """Lambda: tokens, of all sequences, that a second is worth."""
        return max(1.0, self._gate.gain) * len(self._lengths) / self._plain

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """The nodes that are worth verifying. A forward is as wide as its largest tree, so all may be as large."""
        self._trees = self._worthwhile(trees) if any(tree.drafted for tree in trees) else trees
        self._drafted = time.perf_counter()
        return self._trees

    def observe(self, events: SequenceOf[Event], forwards: int) -> None:
        """Learns from the round that :meth:`budget` and :meth:`prune` began; forwards: of the draft."""
        drafting, verifying = self._drafted - self._begun, time.perf_counter() - self._drafted
        tokens = [len(event.emitted) for event in events]
        self.saw(self._trees, [event.path for event in events], tokens, forwards, drafting, verifying)

    def _worthwhile(self, trees: list[TokenTree]) -> list[TokenTree]:
        most = max(tree.drafted for tree in trees)
        gains = [0.0] * (most + 1)
        for tree, share in zip(trees, self._shares, strict=True):
            chances = sorted(self._chances(tree)[1:], reverse=True)
            for i, p in enumerate(chances, 1):
                gains[i] += share * p
        best, value, sum_so_far = 0, -self._worth * self._plain * (1 - _MARGIN), 0.0
        for n in range(1, most + 1):
            sum_so_far += gains[n]
            here = sum_so_far - self._worth * self._costs.verification(n + 1, self._lengths)
            if here > value:
                best, value = n, here
        self._planner.chosen += _FOLLOW * (best - self._planner.chosen)
        return [tree.best(best) for tree in trees]

    def _chances(self, tree: TokenTree) -> list[float]:
        """Of each node's path, the root's first. A path is never likelier than a part of it."""
        found = [1.0] * tree.size
        for node, (promised, grade) in enumerate(_promises(tree)[1:], 1):
            found[node] = min(found[tree.parents[node]], self._calibration.chance(promised, grade))
        return found

    def saw(
        self,
        trees: list[TokenTree],
        paths: list[tuple[int, ...]],
        tokens: list[int],
        forwards: int,
        drafting: float,
        verifying: float,
    ) -> None:
        """Learns from a round.

        Args:
            trees: what was verified; paths: the accepted nodes of each, the root's included.
            tokens: emitted by each sequence.
            forwards: of the draft; drafting, verifying: seconds.
        """
        rows = max(tree.size for tree in trees)
        self._costs.saw(rows, self._lengths, verifying)
        if forwards:
            each = drafting / forwards
            known = each if self._planner.forward is None else self._planner.forward
            self._planner.forward = known + _FOLLOW * (each - known)
        for tree, path in zip(trees, paths, strict=True):
            taken = set(path)
            for node, (promised, grade) in enumerate(_promises(tree)[1:], 1):
                self._calibration.saw(promised, grade, node in taken)
        self._calibration.fade()
        if forwards or (len(trees) > 1 and self._speculating):  # a round without says nothing of what they bring
            worth = sum(share * n for share, n in zip(self._shares, tokens, strict=True))
            self._gate.saw(worth / len(trees), (drafting + verifying) / self._plain)
        for index, n in zip(self._indices, tokens, strict=True):
            self._ends.saw(index, n)


class Ends:
    """In which order the texts of a batch will end, and so what a token of each is worth."""

    def __init__(self) -> None:
        # Tokens and rounds of each text, so far.
        self._seen: dict[int, tuple[int, int]] = {}

    def saw(self, index: int, tokens: int) -> None:
        """A round of a text."""
        before, rounds = self._seen.get(index, (0, 0))
        self._seen[index] = (before + tokens, rounds + 1)

    def shares(self, left: SequenceOf[tuple[int, int]], steps: SequenceOf[float]) -> list[float]:
        """What a token of each text saves, 1 on average.

        Args:
            left: index of each text, and the tokens it may still emit.
            steps: what a plain step of 1, 2, ... texts costs.
        """
        rounds = [remaining / self._pace(index) for index, remaining in left]
        # With the n-th last text, a step of n texts becomes one of n - 1.
        saved = [max(0.0, b - a) for a, b in zip((0.0, *steps), steps, strict=False)]
        found = []
        for mine in rounds:
            # Of those that end together, none ends first.
            later, together = sum(r > mine for r in rounds), rounds.count(mine)
            found.append(sum(saved[later : later + together]) / together)
        return [each * len(left) / sum(saved) for each in found]

    def _pace(self, index: int) -> float:
        """Tokens a round, at first believed to be one."""
        tokens, rounds = self._seen.get(index, (0, 0))
        return (tokens + _USUAL) / (rounds + _USUAL)


def _promises(tree: TokenTree) -> list[tuple[float, int]]:
    """(probability, grade) of each node's path, as its drafter says."""
    return [(exp(score), Calibration.grade(score)) for score in tree.path_log_probs]
