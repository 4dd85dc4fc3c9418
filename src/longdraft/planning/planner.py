"""The planner: what to draft and how much to verify, round by round, for the most tokens per second.

A round that drafts for D seconds, and verifies the n likeliest of its nodes in V(1 + n), emits 1 + p_1 + ... + p_n
tokens on average, where p_i are the nodes' chances of being right, :func:`discounted <cautious>`. The n with the most
tokens a second is verified; n = 0 is plain decoding. In a batch a forward is as wide as its largest tree, so n is
chosen for all texts together.

A lookup costs next to nothing: it proposes first, and says how sure it is. A draft costs forwards, so whether to use it
is decided before it has said anything: by the tokens that it added lately, less those that the lookup proposes already,
against their time (:class:`~longdraft.planning.acceptance_model.Gain`). At first it is believed to pay by a little, so a bad
draft is given up after two or three trials. Evidence fades, so that it is tried again.

What is emitted does not depend on any of this: any tree verifies exactly.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from longdraft.engine.drafter import Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.planning.acceptance_model import AcceptanceModel, DraftGain, PriorDraftGain
from longdraft.planning.costs import OUTLIER_FACTOR, CostModel, CostTable
from longdraft.trees.tree import NodeLimit, TokenTree

# Plain steps that a draft forward is believed to take before one was measured.
INITIAL_FORWARD_STEPS = 0.15
# A node's odds of being right are multiplied by this: the chosen nodes are those whose chances are most overrated, and
# a wide forward between narrow ones costs more than one after another of its kind, which is how costs are measured.
ODDS_FACTOR = 0.45
# The cost of one more row is the average over this many drafted rows.
TYPICAL_NUM_TOKENS = 8
# Weight of a new observation in running averages: time of a draft forward and of a round with it, worthwhile nodes.
SMOOTHING = 0.2
# Worthwhile nodes of a tree before any was seen.
_NODES = 8.0


def discount_odds(p: float) -> float:
    """Discounts a chance."""
    return ODDS_FACTOR * p / (1.0 - p + ODDS_FACTOR * p)


class Planner:
    """Knows the costs of a method on a target, and how its drafts fared. Serves one run after another.

    Args:
        table: of verification costs.
        use_clock: learn from the clock; False: rounds take what the table says, and drafting takes no time.

    Attributes:
        chances, gains: for greedy and for sampled text apart, whose tokens are accepted with smaller chances.
        forward_steps: plain steps that a draft forward takes.
        worthwhile_nodes: running average of the drafted nodes of a tree that are worth verifying.
        tokens_per_step: running average of the tokens of a text in the time of a plain step.
        draft_was_tried: whether the draft has been used.
    """

    def __init__(self, table: CostTable, use_clock: bool = True) -> None:
        self.costs, self.use_clock = CostModel(table), use_clock
        self.acceptance = {greedy: AcceptanceModel() for greedy in (True, False)}
        self.prior_gain = PriorDraftGain(2 * INITIAL_FORWARD_STEPS)
        self.draft_gains = {greedy: DraftGain(self.prior_gain) for greedy in (True, False)}
        self.forward_steps, self.worthwhile_nodes, self.tokens_per_step = INITIAL_FORWARD_STEPS, _NODES, 1.0
        self.draft_was_tried = False

    def start(self, drafter: Drafter | None = None) -> Plan:
        return Plan(self, drafter)


class Plan:
    """The plan of one run, as :class:`longdraft.engine.drafter.Plan` says it."""

    def __init__(self, planner: Planner, drafter: Drafter | None = None) -> None:
        self._planner, self._costs, self._drafter = planner, planner.costs, drafter
        self._gains: dict[int, DraftGain] = {}  # of each text

    def node_limit(self, sequences: SequenceOf[Sequence], lengths: SequenceOf[int] | None = None) -> NodeLimit:
        planner = self._planner
        self._sequences = list(sequences)
        self._lengths = [len(s.prompt) + len(s.output) for s in sequences] if lengths is None else list(lengths)
        self._known_seconds: dict[int, float] = {}
        self._plain = self._verification(1)
        if planner.use_clock and not planner.draft_was_tried:
            self._estimate_draft()
        self._gains = {s.index: self._gains.get(s.index) or DraftGain(planner.draft_gains[s.greedy]) for s in sequences}
        # For each sequence that the draft is used for: the free proposal, cut to what would pay, and the share of the
        # draft's tokens that it lacks.
        self._without_draft: dict[int, tuple[TokenTree, float]] = {}
        self._drafting = 0.0
        # One level more costs its draft forward and a row of the verification.
        level = len(sequences) * planner.forward_steps + self._row()
        return NodeLimit(round(planner.worthwhile_nodes) + 2, level * planner.tokens_per_step, self._choose)

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Keeps the nodes worth verifying. A forward is as wide as its largest tree, so all trees may be as large."""
        self._trees = trees
        if any(tree.num_draft_tokens for tree in trees):
            n = self._best(self._sequences, trees, self._drafting)[0]
            self._planner.worthwhile_nodes += SMOOTHING * (n - self._planner.worthwhile_nodes)
            self._trees = [tree.keep_best(n) for tree in trees]
        return self._trees

    def observe(self, round_results: SequenceOf[RoundResult], forwards: int, drafting: float, verifying: float) -> None:
        planner = self._planner
        if not planner.use_clock:
            drafting, verifying = 0.0, self._verification(self._rows())
        # A refresh of SpecPV reads and verifies more, whatever was drafted.
        if not any(round_result.mode == "refresh" for round_result in round_results):
            self._costs.observe(self._rows(), self._lengths, verifying)
        for round_result in round_results:
            chances = planner.acceptance[round_result.sequence.greedy]
            for node in set(range(1, round_result.tree.size)) - round_result.tree.forced_nodes:
                chances.observe(round_result.tree.path_logprobs[node], node in round_result.path)
        if self._without_draft:
            self._observe_draft(round_results, forwards, drafting)
        emitted = sum(round_result.num_accepted + 1 for round_result in round_results) / len(round_results)
        rate = emitted * self._plain / max(drafting + verifying, self._plain)
        planner.tokens_per_step += SMOOTHING * (max(1.0, rate) - planner.tokens_per_step)
        for chances in planner.acceptance.values():
            chances.decay()
        for gain in (*planner.draft_gains.values(), *self._gains.values()):
            gain.decay()

    # --- costs of this round ---

    def _verification(self, rows: int) -> float:
        """Seconds of this round's forward with so many rows of each text."""
        if rows not in self._known_seconds:
            self._known_seconds[rows] = self._costs.forward_seconds(rows, self._lengths)
        return self._known_seconds[rows]

    def _row(self) -> float:
        """Plain steps that verifying one more row takes."""
        wide = self._verification(1 + TYPICAL_NUM_TOKENS)
        return (wide / self._plain - 1.0) / TYPICAL_NUM_TOKENS

    def _rows(self) -> int:
        """Rows of each text in this round's forward."""
        return max(tree.size for tree in self._trees)

    # --- whether to draft ---

    def _estimate_draft(self) -> None:
        """Estimates a draft before its first use, if it is the target on a part of its KV: what a forward of it takes
        can be computed, and from that whether a chain pays."""
        planner, drafter = self._planner, self._drafter
        rows = [None if drafter is None else drafter.kv_tokens_read(length) for length in self._lengths]
        if drafter is not None and None not in rows:
            seconds = self._costs.forward_seconds(1, [max(1, round(n or 0)) for n in rows])
            planner.forward_steps = drafter.forward_cost_ratio * seconds / self._plain
            planner.prior_gain.extra_steps = planner.forward_steps
            if drafter.prior_acceptance:
                level = len(rows) * planner.forward_steps + self._row()
                planner.prior_gain.assume_best_chain(drafter.prior_acceptance, level)

    def _choose(self, sequences: list[Sequence], free_trees: list[TokenTree]) -> list[Sequence]:
        """Returns the sequences for which the draft is worth using, given what is proposed for nothing."""
        if not sequences or not (self._planner.draft_was_tried or self._planner.prior_gain.is_worthwhile):
            return []
        n, tokens, seconds = self._best(sequences, free_trees, 0.0)
        trees = [tree.keep_best(n) for tree in free_trees]
        gains = [self._gains[s.index] for s in sequences]
        new = [
            self._new_share(s, tree, gain.added_tokens) for s, tree, gain in zip(sequences, trees, gains, strict=True)
        ]
        added = [share * gain.added_tokens for share, gain in zip(new, gains, strict=True)]
        # Tokens that decoding without the draft makes in a plain step.
        rate = tokens / seconds * self._plain
        chosen = [i for i, gain in enumerate(gains) if added[i] > rate * gain.extra_steps / len(sequences)]
        if not chosen:
            return []
        steps = max(gains[i].extra_steps for i in chosen)
        if sum(added[i] for i in chosen) <= rate * steps:
            return []
        self._without_draft = {sequences[i].index: (trees[i], new[i]) for i in chosen}
        self._seconds_without, self._drafting = seconds, steps * self._plain
        return [sequences[i] for i in chosen]

    def _new_share(self, s: Sequence, tree: TokenTree, tokens: float) -> float:
        """The share of a draft's tokens that a tree does not propose already.

        A draft that adds ``tokens`` on average goes on with the chance ``a``, so it reaches depth k with a^k; if the
        tree is right down to there, that adds nothing. The two are taken to be right independently.
        """
        a = tokens / (1.0 + tokens)
        proposed = zip(self._chances(s, tree)[1:], tree.depths[1:], strict=True)
        return max(0.0, 1.0 - sum(p * a**depth for p, depth in proposed) / max(tokens, 1e-9))

    def _observe_draft(self, round_results: SequenceOf[RoundResult], forwards: int, drafting: float) -> None:
        """Learns from a round with the draft what it added and what it took."""
        planner = self._planner
        planner.draft_was_tried = True
        longer = self._verification(self._rows()) - self._seconds_without
        if forwards:
            # The first forwards of all may prepare weights, so a single round's time counts only up to a limit.
            each = min(drafting / forwards / self._plain, OUTLIER_FACTOR * planner.forward_steps)
            planner.forward_steps += SMOOTHING * (each - planner.forward_steps)
            longer += forwards * each * self._plain
        steps = max(longer / self._plain, 1e-6)  # nothing is free
        planner.prior_gain.extra_steps += SMOOTHING * (steps - planner.prior_gain.extra_steps)
        for round_result in round_results:
            if round_result.sequence.index in self._without_draft:
                without, new = self._without_draft[round_result.sequence.index]
                added = max(0, round_result.num_accepted - without.match_length(round_result.new_token_ids))
                for gain in (
                    self._gains[round_result.sequence.index],
                    planner.draft_gains[round_result.sequence.greedy],
                ):
                    gain.observe(added, new, steps)

    # --- how much to verify ---

    def _best(self, sequences: list[Sequence], trees: list[TokenTree], drafting: float) -> tuple[int, float, float]:
        """Finds how many nodes of each tree make the most tokens a second, after ``drafting`` seconds.

        Returns:
            That number, the expected tokens of the round, and its seconds.
        """
        most = max(tree.num_draft_tokens for tree in trees)
        expected = [0.0] * (most + 1)  # tokens that the n-th best nodes of all trees add
        for s, tree in zip(sequences, trees, strict=True):
            for i, p in enumerate(sorted(self._chances(s, tree)[1:], reverse=True), 1):
                expected[i] += discount_odds(p)
        tokens = float(len(self._lengths))
        best = (0, tokens, drafting + self._plain)
        for n in range(1, most + 1):
            tokens += expected[n]
            seconds = drafting + self._verification(n + 1)
            if tokens / seconds > best[1] / best[2]:
                best = (n, tokens, seconds)
        return best

    def _chances(self, s: Sequence, tree: TokenTree) -> list[float]:
        """The chance of each node's path, the root's first. A path is never likelier than a part of it."""
        known, chances = self._planner.acceptance[s.greedy], [1.0] * tree.size
        for node in range(1, tree.size):
            chance = 1.0 if node in tree.forced_nodes else known.probability(tree.path_logprobs[node])
            chances[node] = min(chances[tree.parents[node]], chance)
        return chances
