"""TokenSwift: the target on a part of its KV, chained heads, and phrases of the output (Wu et al. 2025, section 3).

    root -> target on a view of its KV -> 1 token -> heads -> 3 tokens each, level by level     (1, 3, 3, 3)
                                       -> phrases of the output that began with it              one tree with these

A forward of the target reads the root on a sparse view and gives its hidden state; the heads go on from there. Every
phrase of n tokens that was emitted is counted, and the k that began most often with the first drafted token are
proposed too; where nothing else is drafted, those that began with the last token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any

from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.heads import HeadOptions, HeadsDraft, HeadsDrafter
from longdraft.drafters.self_drafter import VIEWS, SelfDrafter, ViewOptions
from longdraft.engine.drafter import Drafter
from longdraft.engine.method import Method, register
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.options import declared, option, parse, takes
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import NodeLimit, TokenTree, tree_from_paths
from longdraft.views.view import check_sizes

# TokenSwift: phrases of four tokens, twenty of them.
PHRASE, PHRASES = 4, 20


class PhraseTable:
    """The phrases of a growing text, counted. Adding a token and looking up take the same time however long it is.

    Args:
        n: tokens of a phrase. k: how many that begin with the same token are kept in order.
    """

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.text: list[int] = []
        # How often each phrase stood in the text, and each beginning of one.
        self._counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
        # By first token, the best k, in order. One that falls out comes back by being seen again, and only so.
        self._best: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)

    def extend(self, tokens: SequenceOf[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if len(self.text) < self.n:
                continue
            phrase = tuple(self.text[-self.n :])
            for length in range(1, self.n + 1):
                self._counts[phrase[:length]] += 1
            self._rank(phrase)

    def _rank(self, phrase: tuple[int, ...]) -> None:
        """Moves the phrase that was just seen before those that are no more frequent."""
        best = self._best[phrase[0]]
        if phrase in best:
            best.remove(phrase)
        count = self._counts[phrase]
        place = next((i for i, other in enumerate(best) if self._counts[other] <= count), len(best))
        best.insert(place, phrase)
        del best[self.k :]

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """The most frequent continuations of a token, n - 1 tokens each, the best first."""
        return [phrase[1:] for phrase in self._best.get(token, ())]

    def logprobs(self, token: int, continuation: SequenceOf[int]) -> list[float]:
        """Log-probability of each token given those before: its share of the continuations, plus one for a new one."""
        phrase = (token, *continuation)
        seen = [self._counts[phrase[:length]] for length in range(1, len(phrase) + 1)]
        return [log(after / (before + 1)) for before, after in pairwise(seen)]


class ReuseDrafter(Drafter):
    """Proposes the phrases of the output that began most often with its last token.

    Args:
        n: tokens of a phrase, the last token of the text among them.
        k: phrases at most; None: the usual number, or one where a fork costs.
    """

    free = True

    def __init__(self, n: int = PHRASE, k: int | None = None) -> None:
        self.n, self.k, self._shaped = n, PHRASES if k is None else k, k is not None
        check_sizes(2, reuse_n=n)
        check_sizes(1, reuse_k=self.k)
        self.max_nodes = self.k * (n - 1)
        self._phrases: dict[int, PhraseTable] = {}

    def use_chains(self) -> bool:
        if not self._shaped:
            self.k, self.max_nodes = 1, self.n - 1
        return self.k == 1

    def observe(self, round_result: RoundResult) -> None:
        if round_result.is_prefill:
            self._phrases[round_result.sequence.index] = PhraseTable(self.n, self.k)

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        trees = []
        for s in sequences:
            phrases, root = self._phrases[s.index], s.output[-1]
            phrases.extend(s.output[len(phrases.text) :])
            found = phrases.continuations(root)
            trees.append(tree_from_paths(root, found, logprobs=[phrases.logprobs(root, path) for path in found]))
        return trees

    def extend_draft(self, s: Sequence, drafted: TokenTree) -> TokenTree:
        """The phrases that begin with the first token of a drafted tree, behind it."""
        first = max(drafted.children(0).values(), key=drafted.path_logprobs.__getitem__)
        token, phrases = drafted.tokens[first], self._phrases[s.index]
        found, logprob = phrases.continuations(token), drafted.path_logprobs[first]
        logprobs = [[logprob, *phrases.logprobs(token, path)] for path in found]
        return tree_from_paths(s.output[-1], [(token, *path) for path in found], logprobs=logprobs)

    def release(self, sequence: Sequence) -> None:
        self._phrases.pop(sequence.index, None)


class TokenSwiftDrafter(CombinedDrafter):
    """Heads, and the phrases that go on from the first token that they draft."""

    unpaid: ReuseDrafter

    def adapt_lookup(self, s: Sequence, tree: TokenTree, paid: TokenTree) -> TokenTree:
        return self.unpaid.extend_draft(s, paid) if paid.num_draft_tokens else tree


# In place of a view: no forward of the target drafts.
NO_VIEW = "none"


@dataclass(frozen=True)
class TokenSwiftOptions(ViewOptions):
    """The target's own part of the drafts, and phrases of the output."""

    view: str = option(
        "tokens", choices=(*VIEWS, NO_VIEW), help="what of its KV the target drafts on; none: it does not"
    )
    reuse: bool = option(True, help="also propose phrases of the output")
    reuse_n: int = option(PHRASE, min=2, help="tokens of a phrase")
    reuse_k: int = option(PHRASES, min=1, help="phrases at most")


@takes(HeadOptions, TreeOptions, TokenSwiftOptions)
def tokenswift(draft: HeadsDraft, **options: Any) -> Drafter:
    """TokenSwift's drafter (Wu et al. 2025, arXiv:2502.18890, section 3).

    Args:
        options: of :class:`HeadOptions`, :class:`TreeOptions` (``nodes`` counts those of the heads alone; the first of
            ``widths`` is the level that the target itself drafts) and :class:`TokenSwiftOptions`.
    """
    heads, tree, own = parse("tokenswift", options, HeadOptions, TreeOptions, TokenSwiftOptions)
    sizes = {name: getattr(own, name) for name in declared(ViewOptions)}
    level = None
    if own.view != NO_VIEW:
        level = SelfDrafter(view=own.view, depth=1, **sizes)
    elif given := [name for name, value in sizes.items() if value is not None]:
        raise ValueError(f"{' and '.join(given)} shape a view of the KV: leave view={NO_VIEW} out, or them")
    trained = HeadsDrafter(draft, level, **heads.given(), **tree.given())
    phrases = own.reuse_k if "reuse_k" in options else None
    return TokenSwiftDrafter(ReuseDrafter(own.reuse_n, phrases), trained) if own.reuse else trained


register(
    Method(
        "tokenswift",
        tokenswift,
        "the heads, behind a forward of the model on a part of its KV cache, and phrases of the output",
        "Wu et al. 2025, TokenSwift, arXiv:2502.18890",
        draft_kind="heads",
    )
)
