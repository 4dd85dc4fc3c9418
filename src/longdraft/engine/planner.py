"""The planner decides how much to draft and how much to verify in each round, for the most tokens per second.

A round that drafts for D seconds, and verifies its n most probable nodes in V(1 + n) seconds, emits 1 + p_1 + ... + p_n
tokens on average. p_i is the i-th node's acceptance probability, with :func:`discounted odds <discount_odds>`. The
planner chooses the n with the most tokens per second; n = 0 is plain decoding. A batch pays for its largest tree in
every sequence, so one n is chosen for all sequences.

A lookup costs next to nothing, so it proposes in every round. A draft model costs forwards. The planner runs the draft
model if its recently added tokens, those that the lookup had not proposed, were worth the time of drafting
(:class:`~longdraft.planning.acceptance.DraftGain`). At first a draft model is assumed to gain a little, so a bad
draft model is given up after two or three rounds. Evidence decays, so the draft model is tried again later, and ever
more rarely while trials are in vain. Times are in plain steps: a plain step is a decoding step without a draft.

The output does not depend on the plan: verification is exact for any tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

from longdraft.engine.drafter import CHEAP_FORWARD_RATIO, Drafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.model.load.checkpoints import Progress
from longdraft.model.runner import TargetRunner
from longdraft.planning.acceptance import AcceptanceModel, DraftGain, PriorDraftGain
from longdraft.planning.costs import OUTLIER_FACTOR, CostModel, CostTable, load_or_measure
from longdraft.planning.plans import PlanChoice, constant_table
from longdraft.trees.tree import NodeLimit, TokenTree

INITIAL_FORWARD_STEPS = 0.15  # assumed time of a draft forward before the first measurement, in plain steps
# Factor on a node's acceptance odds. It corrects two errors. The nodes with the highest estimates are overestimated the
# most. And a wide forward between narrow ones costs more than in the series of equal forwards that was measured.
ODDS_FACTOR = 0.45
TYPICAL_NUM_TOKENS = 8  # the cost of one more token in a forward is the average over this many tokens
SMOOTHING = 0.2  # weight of a new observation in running averages
_INITIAL_NODES = 8.0  # initial value of ``Planner.worthwhile_nodes``


def discount_odds(p: float) -> float:
    """Returns the probability whose odds are those of ``p`` times ``ODDS_FACTOR``."""
    return ODDS_FACTOR * p / (1.0 - p + ODDS_FACTOR * p)


class Planner:
    """Costs and acceptance of a method on a target, as learned from all rounds so far. A :class:`RoundPlan` uses them.

    Args:
        table: seconds of target forwards.
        use_clock: True: learn from measured times; False: assume the table's times, and no time for drafting.

    Attributes:
        costs: predicts the seconds of target forwards.
        acceptance: {is greedy: acceptance model}. Sampled tokens are accepted less often than greedy ones.
        draft_gains: {is greedy: gain of drafting}, over all sequences.
        sequence_gains: {sequence: gain of drafting for this sequence}.
        prior_gain: the assumed gain of drafting before the draft model's first use.
        forward_steps: time of a draft forward in plain steps.
        worthwhile_nodes: running average of the number of draft nodes that are worth verifying.
        tokens_per_step: running average of the tokens that a sequence emits in the time of a plain step.
        draft_was_tried: True if the draft model has been used.
    """

    def __init__(self, table: CostTable, use_clock: bool = True) -> None:
        self.costs, self.use_clock = CostModel(table), use_clock
        self.acceptance = {greedy: AcceptanceModel() for greedy in (True, False)}
        self.prior_gain = PriorDraftGain(2 * INITIAL_FORWARD_STEPS)  # as if a round had two draft forwards
        self.draft_gains = {greedy: DraftGain(self.prior_gain) for greedy in (True, False)}
        self.forward_steps, self.worthwhile_nodes, self.tokens_per_step = INITIAL_FORWARD_STEPS, _INITIAL_NODES, 1.0
        self.draft_was_tried = False
        self.sequence_gains: WeakKeyDictionary[Sequence, DraftGain] = WeakKeyDictionary()


class RoundPlan:
    """The plan of one round: bounds the drafts, prunes the trees, and then learns from the results.

    Args:
        planner: what earlier rounds have taught.
        drafter: drafts in this round.
        sequences: the batch.
        kv_lens: number of KV entries that are read to verify each sequence.
    """

    def __init__(self, planner: Planner, drafter: Drafter, sequences: list[Sequence], kv_lens: SequenceOf[int]) -> None:
        self._planner, self._sequences, self._kv_lens = planner, sequences, kv_lens
        self._seconds_by_tokens: dict[int, float] = {}
        self._plain_seconds = self._forward_seconds(1)
        if planner.use_clock and not planner.draft_was_tried:
            self._estimate_draft(drafter)
        for s in sequences:
            planner.sequence_gains.setdefault(s, DraftGain(planner.draft_gains[s.greedy]))
        # For each sequence that the draft model runs for: the lookup's tree, pruned as if there were no draft model,
        # and the fraction of the draft model's tokens that are not in this tree.
        self._lookup_baselines: dict[Sequence, tuple[TokenTree, float]] = {}
        self._draft_seconds = 0.0

    @property
    def limit(self) -> NodeLimit:
        """The bounds of this round's trees."""
        planner = self._planner
        # One more level costs a draft forward for each sequence, and one more token to verify.
        level_steps = len(self._sequences) * planner.forward_steps + self._token_steps()
        max_nodes = round(planner.worthwhile_nodes) + 2  # more than on average, so that the average can grow
        return NodeLimit(max_nodes, level_steps * planner.tokens_per_step, self._select_sequences)

    def prune(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Keeps the nodes worth verifying: equally many in each tree, because the largest tree sets the cost."""
        if not any(tree.num_draft_tokens for tree in trees):
            return trees
        num_nodes = self._best_node_count(self._sequences, trees, self._draft_seconds)[0]
        self._planner.worthwhile_nodes += SMOOTHING * (num_nodes - self._planner.worthwhile_nodes)
        return [tree.keep_best(num_nodes) for tree in trees]

    def observe(
        self, results: SequenceOf[RoundResult], num_draft_forwards: int, seconds: float, draft_seconds: float | None
    ) -> None:
        """Learns from a round.

        Args:
            results: the results of all sequences.
            seconds: wall time of the round.
            draft_seconds: wall time of drafting, a part of ``seconds``; None: one CUDA graph drafted and verified. Then
                what the verification takes beside is taken as predicted, and trees were not pruned.
        """
        planner, query_len = self._planner, max(result.tree.size for result in results)
        if draft_seconds is None:
            self.prune([result.tree for result in results])  # learns how many nodes would have been worth verifying
            draft_seconds = max(0.0, seconds - self._forward_seconds(query_len))
        verify_seconds = seconds - draft_seconds
        if not planner.use_clock:
            draft_seconds, verify_seconds = 0.0, self._forward_seconds(query_len)
        # A SpecPV round that refreshes also verifies earlier tokens, so its time says nothing about this round's trees.
        if not any(result.mode == "refresh" for result in results):
            planner.costs.observe(query_len, self._kv_lens, verify_seconds)
        for result in results:
            acceptance, tree = planner.acceptance[result.sequence.greedy], result.tree
            for node in set(range(1, tree.size)) - tree.forced_nodes:
                acceptance.observe(tree.path_logprobs[node], node in result.path)
        if self._lookup_baselines:
            extra_seconds = self._forward_seconds(query_len) - self._seconds_without_draft
            self._observe_draft(results, num_draft_forwards, draft_seconds, extra_seconds)
        num_emitted = sum(result.num_accepted + 1 for result in results) / len(results)
        tokens_per_step = num_emitted * self._plain_seconds / max(draft_seconds + verify_seconds, self._plain_seconds)
        planner.tokens_per_step += SMOOTHING * (max(1.0, tokens_per_step) - planner.tokens_per_step)
        for acceptance in planner.acceptance.values():
            acceptance.decay()
        for greedy, gain in planner.draft_gains.items():
            gain.decay(any(s.greedy == greedy for s in self._lookup_baselines))
        for s in self._sequences:
            planner.sequence_gains[s].decay(s in self._lookup_baselines)

    # --- costs of this round ---

    def _forward_seconds(self, query_len: int) -> float:
        """Returns the seconds of this round's target forward, if it has ``query_len`` tokens of each sequence."""
        if query_len not in self._seconds_by_tokens:
            self._seconds_by_tokens[query_len] = self._planner.costs.forward_seconds(query_len, self._kv_lens)
        return self._seconds_by_tokens[query_len]

    def _token_steps(self) -> float:
        """Returns the time to verify one more token, in plain steps."""
        wide_seconds = self._forward_seconds(1 + TYPICAL_NUM_TOKENS)
        return (wide_seconds / self._plain_seconds - 1.0) / TYPICAL_NUM_TOKENS

    # --- whether to draft ---

    def _estimate_draft(self, drafter: Drafter) -> None:
        """Estimates the gain of self-drafting before the first use: the draft model is the target on a part of the KV,
        so the cost table gives the time of a draft forward."""
        planner, cost = self._planner, drafter.self_draft_cost
        if cost is not None:
            kv_read = [max(1, round(cost.kv_tokens_read(kv_len))) for kv_len in self._kv_lens]
            seconds = planner.costs.forward_seconds(1, kv_read)
            planner.forward_steps = cost.forward_ratio * seconds / self._plain_seconds
            planner.prior_gain.extra_steps = planner.forward_steps
            steps_per_token = len(kv_read) * planner.forward_steps + self._token_steps()
            acceptance = cost.prior_acceptance(max(self._kv_lens))
            planner.prior_gain.assume_best_chain(acceptance, steps_per_token, cost.forward_ratio < CHEAP_FORWARD_RATIO)

    def _select_sequences(self, sequences: list[Sequence], lookup_trees: list[TokenTree]) -> list[Sequence]:
        """Returns the sequences for which the draft model is worth running, given the trees that lookups proposed."""
        if not sequences or not (self._planner.draft_was_tried or self._planner.prior_gain.is_worthwhile):
            return []
        num_nodes, num_tokens, seconds = self._best_node_count(sequences, lookup_trees, 0.0)
        trees = [tree.keep_best(num_nodes) for tree in lookup_trees]
        gains = [self._planner.sequence_gains[s] for s in sequences]
        inputs = zip(sequences, trees, gains, strict=True)
        new_fractions = [self._new_fraction(s, tree, gain.added_tokens) for s, tree, gain in inputs]
        new_tokens = [fraction * gain.added_tokens for fraction, gain in zip(new_fractions, gains, strict=True)]
        # Tokens that all sequences together emit without the draft model in the time of a plain step.
        lookup_rate = num_tokens / seconds * self._plain_seconds
        selected = [i for i, gain in enumerate(gains) if new_tokens[i] > lookup_rate * gain.extra_steps / len(gains)]
        if not selected:
            return []
        extra_steps = max(gains[i].extra_steps for i in selected)
        if sum(new_tokens[i] for i in selected) <= lookup_rate * extra_steps:
            return []
        self._lookup_baselines = {sequences[i]: (trees[i], new_fractions[i]) for i in selected}
        self._seconds_without_draft, self._draft_seconds = seconds, extra_steps * self._plain_seconds
        return [sequences[i] for i in selected]

    def _new_fraction(self, s: Sequence, tree: TokenTree, added_tokens: float) -> float:
        """Returns the fraction of the draft model's tokens that ``tree`` does not propose already.
        A draft model that adds ``added_tokens`` on average is accepted to depth k with probability a^k. It adds nothing
        there if a path of ``tree`` to depth k is accepted too. The two events are assumed to be independent."""
        a = added_tokens / (1.0 + added_tokens)
        proposed = zip(self._path_probabilities(s, tree)[1:], tree.depths[1:], strict=True)
        return max(0.0, 1.0 - sum(p * a**depth for p, depth in proposed) / max(added_tokens, 1e-9))

    def _observe_draft(
        self, results: SequenceOf[RoundResult], num_forwards: int, draft_seconds: float, extra_seconds: float
    ) -> None:
        """Learns from a round with the draft model: the tokens that drafting added, and the time that drafting took.
        ``extra_seconds``: time of verifying more tokens than without the draft model."""
        planner = self._planner
        planner.draft_was_tried = True
        if num_forwards:
            # The first forwards may also prepare weights, so the time of one round counts only up to a limit.
            measured_steps = draft_seconds / num_forwards / self._plain_seconds
            forward_steps = min(measured_steps, OUTLIER_FACTOR * planner.forward_steps)
            planner.forward_steps += SMOOTHING * (forward_steps - planner.forward_steps)
            extra_seconds += num_forwards * forward_steps * self._plain_seconds
        extra_steps = max(extra_seconds / self._plain_seconds, 1e-6)  # positive, so that a gain has a cost
        planner.prior_gain.extra_steps += SMOOTHING * (extra_steps - planner.prior_gain.extra_steps)
        for result in results:
            sequence = result.sequence
            if sequence in self._lookup_baselines:
                tree, new_fraction = self._lookup_baselines[sequence]
                added_tokens = max(0, result.num_accepted - tree.match_length(result.new_token_ids))
                for gain in (planner.sequence_gains[sequence], planner.draft_gains[sequence.greedy]):
                    gain.observe(added_tokens, new_fraction, extra_steps)

    # --- how much to verify ---

    def _best_node_count(
        self, sequences: list[Sequence], trees: list[TokenTree], draft_seconds: float
    ) -> tuple[int, float, float]:
        """Finds the number of nodes of each tree that gives the most tokens per second after ``draft_seconds``.

        Returns:
            (number of nodes, expected tokens of the round over all sequences, seconds of the round).
        """
        max_nodes = max(tree.num_draft_tokens for tree in trees)
        added_tokens = [0.0] * (max_nodes + 1)  # [n]: expected tokens that the n-th best nodes of all trees add
        for s, tree in zip(sequences, trees, strict=True):
            for n, p in enumerate(sorted(self._path_probabilities(s, tree)[1:], reverse=True), 1):
                added_tokens[n] += discount_odds(p)
        num_tokens = float(len(self._kv_lens))  # without drafts, each sequence of the round emits one token
        best = (0, num_tokens, draft_seconds + self._plain_seconds)
        for n in range(1, max_nodes + 1):
            num_tokens += added_tokens[n]
            seconds = draft_seconds + self._forward_seconds(n + 1)
            if num_tokens / seconds > best[1] / best[2]:
                best = (n, num_tokens, seconds)
        return best

    def _path_probabilities(self, s: Sequence, tree: TokenTree) -> list[float]:
        """Returns the acceptance probability of the path to each node, at most that of the path to its parent."""
        acceptance, probabilities = self._planner.acceptance[s.greedy], [1.0] * tree.size
        for node in range(1, tree.size):
            p = 1.0 if node in tree.forced_nodes else acceptance.probability(tree.path_logprobs[node])
            probabilities[node] = min(probabilities[tree.parents[node]], p)
        return probabilities


def make_planner(plan: PlanChoice, runner: TargetRunner, progress: Progress | None = None) -> Planner | None:
    """Makes a planner with given or measured costs; returns None if there is not enough memory to measure them."""
    if isinstance(plan, Mapping):
        return Planner(constant_table(plan), use_clock=False)
    table = load_or_measure(runner, progress=progress)
    return None if table is None else Planner(table)
