"""How many tokens to draft: the closed form of the papers beside what decoding does (MagicDec, section 3).

A round that drafts a chain of gamma tokens, each right with probability alpha if those before it were, emits

    Omega(gamma, alpha) = (1 - alpha^(gamma + 1)) / (1 - alpha)

tokens on average (Leviathan et al. 2023, equation 1), and takes gamma T_D + T_V(gamma), where a plain step takes T_T.
So decoding is Omega T_T / (gamma T_D + T_V(gamma)) times as fast. T_T and T_V are the planner's measured costs; alpha
and T_D come from one chain's rounds, the reference's. Every other chain is predicted, and decoded too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from longdraft.bench.contenders import Job, Kept, Ours, Run
from longdraft.bench.prompts import Prompt
from longdraft.bench.settings import REFERENCE, Settings, method_name
from longdraft.errors import CapabilityError
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.checkpoints import LoadedModel
from longdraft.planning.plans import planner_for
from longdraft.speculator import Speculator


def omega(gamma: int, alpha: float) -> float:
    """Tokens of a round, bonus included."""
    return float(gamma + 1) if alpha == 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


@dataclass(frozen=True)
class Chain:
    """A method with chains of one length on one prompt.

    Attributes:
        speedup: over plain decoding, measured; predicted: by the closed form.
        accepted: mean accepted length, bonus included; None where there was no round.
    """

    gamma: int
    speedup: float
    predicted: float
    accepted: float | None


@dataclass(frozen=True)
class Found:
    """What was seen of a method on a prompt.

    Attributes:
        alpha: share of drafted tokens that were right, of those whose predecessors were; of the reference.
        step: seconds of a plain step. draft: of a drafted token, in plain steps.
        verification: by gamma, in plain steps.
        chains: by gamma, in order.
    """

    method: str
    origin: str
    prompt_tokens: int
    alpha: float
    step: float
    draft: float
    verification: Mapping[int, float]
    chains: tuple[Chain, ...]

    def best(self, by: Callable[[Chain], float]) -> int:
        """The gamma that is best by that; 0: plain decoding."""
        chain = max(self.chains, key=by)
        return chain.gamma if by(chain) > 1.0 else 0


def alpha_of(run: Run, gamma: int) -> float:
    """Share of drafted tokens that were right, of those whose predecessors were."""
    tried = right = 0
    for accepted, room in run.accepted:
        drafted = min(gamma, room)
        right += accepted
        tried += accepted + (accepted < drafted)
    return right / tried if tried else 0.0


def check(gammas: Sequence[int], reference: int) -> None:
    """Raises ValueError for lengths of chains that make none, or lack the reference."""
    if min(gammas, default=0) < 1 or reference not in gammas:
        raise ValueError(f"gammas must be 1 at least, with the reference {reference} among them, got {gammas}")


class Gamma:
    """Decodes prompts with chains of several lengths.

    Args:
        settings: whose methods draft chains; ``ar`` is measured in any case.
        gammas: tokens of a chain. reference: of them, the one whose rounds the prediction is made from.

    Raises:
        CapabilityError: nothing says what verifications cost here.
        ValueError: a method whose trees have no length, or lengths that make no chain.
    """

    def __init__(self, loaded: LoadedModel, settings: Settings, gammas: Sequence[int], reference: int) -> None:
        check(gammas, reference)
        self._settings, self.gammas, self._reference = settings, tuple(sorted(set(gammas))), reference
        self._kept = Kept(PromptCache(), snapshots=settings.snapshots)
        self.methods = tuple(name for name in settings.contenders if name != REFERENCE)

        def contender(name: str, **options: Any) -> Ours:
            own = {**settings.options(name), **options}
            return Ours(
                name, Speculator(method_name(name), loaded.model, loaded.tokenizer, plan="fixed", **own), self._kept
            )

        self._plain = contender(REFERENCE)
        self._chains = {name: {g: contender(name, depth=g) for g in self.gammas} for name in self.methods}
        planner = planner_for(self._plain.spec.runner())
        if planner is None:
            raise CapabilityError("What verifications cost cannot be measured here: there is not enough memory.")
        self._costs = planner.costs

    @property
    def names(self) -> list[str]:
        """Of all runs on a prompt, in order."""
        chains = [f"{name}, gamma {g}" for name in self.methods for g in self.gammas]
        return ["reading the prompt", REFERENCE, *chains]

    def measure(self, prompt: Prompt, tick: Callable[[str], None] = lambda what: None) -> list[Found]:
        """Each method on a prompt: plain decoding and all chains once, from the same KV."""
        job = Job(
            (prompt.tokens,), self._settings.max_tokens, self._settings.sampling, self._settings.seed, frozenset()
        )
        ticks = iter(self.names)
        tick(next(ticks))
        self._plain.cold(job)
        tick(next(ticks))
        plain = self._plain.warm(job)
        found = []
        for name, chains in self._chains.items():
            runs = {}
            for g, chain in chains.items():
                tick(next(ticks))
                runs[g] = chain.warm(job)
            found.append(self._found(name, prompt, plain, runs))
        self._kept.clear()
        return found

    def _found(self, name: str, prompt: Prompt, plain: Run, runs: Mapping[int, Run]) -> Found:
        length = [len(prompt.tokens) + self._settings.max_tokens // 2]
        step = self._costs.verification(1, length)
        verification = {g: self._costs.verification(g + 1, length) / step for g in self.gammas}
        reference = runs[self._reference]
        alpha = alpha_of(reference, self._reference)
        # Rounds in plain steps as they were in this run, so that a slow minute of the machine falls out.
        slow = plain.decode_seconds / max(1, sum(plain.rounds))
        each = reference.decode_seconds / max(1, sum(reference.rounds)) / slow
        draft = max(0.0, each - verification[self._reference]) / self._reference
        speed = plain.tokens_per_second or 0.0
        chains = tuple(
            Chain(
                g,
                (run.tokens_per_second or 0.0) / speed if speed else 0.0,
                omega(g, alpha) / (g * draft + verification[g]),
                run.mean_accepted_length,
            )
            for g, run in runs.items()
        )
        return Found(name, prompt.sample.origin, len(prompt.tokens), alpha, slow, draft, verification, chains)


def summary(found: Sequence[Found]) -> list[dict[str, Any]]:
    """A row for each prompt and method, with the keys that docs/figures.md defines."""
    return [
        {
            "method": one.method,
            "sample": one.origin,
            "prompt_tokens": one.prompt_tokens,
            "alpha": one.alpha,
            "step_seconds": one.step,
            "draft_steps": one.draft,
            "verification_steps": {str(g): steps for g, steps in one.verification.items()},
            "chains": [vars(chain) for chain in one.chains],
            "predicted_best": one.best(lambda chain: chain.predicted),
            "measured_best": one.best(lambda chain: chain.speedup),
        }
        for one in found
    ]


def medians(found: Sequence[Found]) -> list[tuple[str, int, float, float, float | None]]:
    """Method, gamma, medians over the prompts: speed-up measured and predicted, mean accepted length."""
    rows = []
    for name in dict.fromkeys(one.method for one in found):
        own = [one for one in found if one.method == name]
        for chains in zip(*(one.chains for one in own), strict=True):
            accepted = [c.accepted for c in chains if c.accepted is not None]
            rows.append(
                (name, chains[0].gamma, median(c.speedup for c in chains), median(c.predicted for c in chains),
                 median(accepted) if accepted else None)
            )  # fmt: skip
    return rows
