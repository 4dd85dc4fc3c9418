"""The planner: what to draft and how much to verify, round by round, for the most tokens per second.

A round that drafts for D seconds, and verifies the n likeliest of its nodes in V(1 + n), emits 1 + p_1 + ... + p_n
tokens on average, p_i their chances of being right, taken :func:`with caution <cautious>`. The n with the most tokens
a second is verified; n = 0 is plain decoding. In a batch a forward is as wide as its largest tree, so nodes are worth
what all texts get from as many.

A lookup costs next to nothing: it is asked first, and says how sure it is. A draft costs forwards, so whether to ask it
is decided before it has said anything: by the tokens it added lately, less those that the lookup has already, against
what they take (:class:`~longdraft.planning.chances.Worth`). At first it is believed to pay by a
little, so a bad one is given up after two or three trials. Evidence fades, so that it is tried again.

What is emitted does not depend on any of this: any tree verifies exactly.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.planning.chances import Chances, Hope, Worth
from longdraft.planning.costs import OUTLIER, Costs, CostTable
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree

# A draft forward, in plain steps, before one was seen.
FORWARD = 0.15
# Odds of a node are taken for so much of what they are: chosen nodes are those whose chances are most overrated, and a
# wide forward between narrow ones costs more than one after another of its kind, which is how costs are measured.
CAUTION = 0.45
# Drafted rows by which what one more costs is reckoned.
TYPICAL = 8
# How fast averages follow: time of a draft forward and of a round with it, nodes worth verifying.
FOLLOW = 0.2


def cautious(p: float) -> float:
    """What a chance counts for."""
    return CAUTION * p / (1.0 - p + CAUTION * p)


class Planner:
    """What is known of a method on a target: costs, and what became of its drafts. Serves one run after another.

    Args:
        table: what verifications cost.
    """

    def __init__(self, table: CostTable) -> None:
        self.costs = Costs(table)
        # Sampled text is accepted by other chances than greedy text, and by smaller ones.
        self.chances = {greedy: Chances() for greedy in (True, False)}
        self.hope = Hope(2 * FORWARD)
        self.worth = {greedy: Worth(self.hope) for greedy in (True, False)}
        self.forward = FORWARD
        self.nodes = 8.0  # lately worth verifying
        self.drafter: Drafter | None = None
        self.tried = False
        self.rate = 1.0  # tokens of a text that lately came in the time of a plain step: what that time is worth

    def expect(self, drafter: Drafter) -> None:
        """Told whose drafts it plans, before a run."""
        self.drafter = drafter

    def start(self) -> Plan:
        """Plans a run."""
        return Plan(self)


class Plan:
    """Plans the rounds of one run: each asks for a node limit, then what is worth verifying, and says how it went."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._costs = planner, planner.costs
        self._worth: dict[int, Worth] = {}  # of each text

    def node_limit(self, sequences: SequenceOf[Sequence], lengths: SequenceOf[int] | None = None) -> NodeLimit:
        """What this round's trees may be.

        Args:
            lengths: rows of KV that a verification reads of each; None: of all of its text.
        """
        planner = self._planner
        self._sequences = list(sequences)
        self._lengths = [len(s.prompt) + len(s.output) for s in sequences] if lengths is None else list(lengths)
        self._known: dict[int, float] = {}
        self._plain = self._verification(1)
        if not planner.tried:
            self._guess()
        self._worth = {s.index: self._worth.get(s.index) or Worth(planner.worth[s.greedy]) for s in sequences}
        # Of each sequence that is drafted for: what is proposed without, cut to what would pay, and the share of drafts
        # that is not in that.
        self._without: dict[int, tuple[TokenTree, float]] = {}
        self._drafting = 0.0
        # A level more: its forward, and a row more of the verification.
        level = len(sequences) * planner.forward + self._row()
        return NodeLimit(round(planner.nodes) + 2, level * planner.rate, self._choose)

    def _verification(self, rows: int) -> float:
        """Seconds of this round's forward with so many rows of each text."""
        if rows not in self._known:
            self._known[rows] = self._costs.verification(rows, self._lengths)
        return self._known[rows]

    def _row(self) -> float:
        """Plain steps that verifying one more row takes."""
        wide = self._verification(1 + TYPICAL)
        return (wide / self._plain - 1.0) / TYPICAL

    def plain(self, sequences: SequenceOf[Sequence]) -> float:
        """Seconds of a plain step on all of the texts."""
        return self._costs.verification(1, [len(s.prompt) + len(s.output) for s in sequences])

    def _guess(self) -> None:
        """Before the first draft: what a forward of the target on a part of its KV takes is known, and so is whether a
        chain of them pays."""
        planner, drafter = self._planner, self._planner.drafter
        rows = [None if drafter is None else drafter.rows_read(length) for length in self._lengths]
        if drafter is not None and None not in rows:
            own = self._costs.verification(1, [max(1, round(n or 0)) for n in rows])
            planner.forward = drafter.forward_ratio * own / self._plain
            planner.hope.steps = planner.forward
            if drafter.prior_acceptance:
                planner.hope.chain(drafter.prior_acceptance, len(rows) * planner.forward + self._row())

    def _choose(self, sequences: list[Sequence], trees: list[TokenTree]) -> list[Sequence]:
        """The sequences whose drafts are worth asking, told what is proposed for nothing."""
        if not sequences or not (self._planner.tried or self._planner.hope.pays):
            return []
        n, tokens, seconds = self._best(sequences, trees, 0.0)
        trees = [tree.best(n) for tree in trees]
        worth = [self._worth[s.index] for s in sequences]
        new = [self._new(s, tree, w.tokens) for s, tree, w in zip(sequences, trees, worth, strict=True)]
        # Tokens that decoding makes in a plain step, without.
        rate = tokens / seconds * self._plain
        added = [share * w.tokens for share, w in zip(new, worth, strict=True)]
        chosen = [i for i, w in enumerate(worth) if added[i] > rate * w.steps / len(sequences)]
        if not chosen:
            return []
        steps = max(worth[i].steps for i in chosen)
        if sum(added[i] for i in chosen) <= rate * steps:
            return []
        self._without = {sequences[i].index: (trees[i], new[i]) for i in chosen}
        self._seconds, self._drafting = seconds, steps * self._plain
        return [sequences[i] for i in chosen]

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """The nodes that are worth verifying. A forward is as wide as its largest tree, so all may be as large."""
        self._trees = trees
        if any(tree.drafted for tree in trees):
            n = self._best(self._sequences, trees, self._drafting)[0]
            self._planner.nodes += FOLLOW * (n - self._planner.nodes)
            self._trees = [tree.best(n) for tree in trees]
        return self._trees

    def _best(self, sequences: list[Sequence], trees: list[TokenTree], drafting: float) -> tuple[int, float, float]:
        """How many nodes of each tree make the most tokens a second; those tokens, and seconds with ``drafting``."""
        most = max(tree.drafted for tree in trees)
        gains = [0.0] * (most + 1)
        for s, tree in zip(sequences, trees, strict=True):
            for i, p in enumerate(sorted(self._chances(s, tree)[1:], reverse=True), 1):
                gains[i] += cautious(p)
        tokens = float(len(self._lengths))
        found = (0, tokens, drafting + self._plain)
        for n in range(1, most + 1):
            tokens += gains[n]
            seconds = drafting + self._verification(n + 1)
            if tokens / seconds > found[1] / found[2]:
                found = (n, tokens, seconds)
        return found

    def _new(self, s: Sequence, tree: TokenTree, tokens: float) -> float:
        """The share of what a draft would add that a tree does not hold already.

        A draft of ``tokens`` on average goes on with the chance ``a``, so it reaches depth k with a^k; where the tree
        is right down to there, that adds nothing. Whether one is right is taken to say nothing of the other.
        """
        a = tokens / (1.0 + tokens)
        held = zip(self._chances(s, tree)[1:], tree.depths[1:], strict=True)
        return max(0.0, 1.0 - sum(p * a**depth for p, depth in held) / max(tokens, 1e-9))

    def _chances(self, s: Sequence, tree: TokenTree) -> list[float]:
        """Of each node's path, the root's first. A path is never likelier than a part of it."""
        known, found = self._planner.chances[s.greedy], [1.0] * tree.size
        for node in range(1, tree.size):
            found[node] = min(found[tree.parents[node]], known.chance(tree.path_log_probs[node]))
        return found

    def observe(self, events: SequenceOf[Event], forwards: int, drafting: float, verifying: float) -> None:
        """Learns from the round.

        Args:
            events: one a sequence. forwards: of the draft. drafting, verifying: seconds.
        """
        planner = self._planner
        # A refresh of SpecPV reads and verifies more, whatever was drafted.
        if not any(event.mode == "refresh" for event in events):
            self._costs.saw(max(tree.size for tree in self._trees), self._lengths, verifying)
        for event in events:
            for node in range(1, event.tree.size):
                right = node in event.path
                planner.chances[event.sequence.greedy].saw(event.tree.path_log_probs[node], right)
        if self._without:
            self._account(events, forwards, drafting)
        emitted = sum(event.accepted + 1 for event in events) / len(events)
        rate = emitted * self._plain / max(drafting + verifying, self._plain)
        planner.rate += FOLLOW * (max(1.0, rate) - planner.rate)
        for chances in planner.chances.values():
            chances.fade()
        for worth in (*planner.worth.values(), *self._worth.values()):
            worth.fade()

    def _account(self, events: SequenceOf[Event], forwards: int, drafting: float) -> None:
        """What a round with the draft brought, and what it took."""
        planner, rows = self._planner, max(tree.size for tree in self._trees)
        planner.tried = True
        longer = self._verification(rows) - self._seconds
        if forwards:
            # The first forwards of all may prepare weights: no single round is believed to be as dear as it looks.
            each = min(drafting / forwards / self._plain, OUTLIER * planner.forward)
            planner.forward += FOLLOW * (each - planner.forward)
            longer += forwards * each * self._plain
        steps = max(longer / self._plain, 1e-6)  # nothing is free
        planner.hope.steps += FOLLOW * (steps - planner.hope.steps)
        for event in events:
            if event.sequence.index in self._without:
                without, new = self._without[event.sequence.index]
                added = max(0, event.accepted - without.follows(event.target_tokens))
                for worth in (self._worth[event.sequence.index], planner.worth[event.sequence.greedy]):
                    worth.saw(added, new, steps)
