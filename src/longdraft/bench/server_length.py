"""Servers against the length of the text: the same texts, cut to each length, answered by every server in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from longdraft.bench.data import Sample
from longdraft.bench.servers import Answer, Server
from longdraft.bench.settings import REFERENCE
from longdraft.bench.tables import circumstances, median_of, ratio

# Characters of a token, until a server has counted a prompt's.
CHARACTERS = 3.5


class Servers:
    """The measurement.

    Args:
        servers: by name; ``ar`` is the one that decodes plainly.
        lengths: tokens of the prompts, as nearly as characters tell; the servers' own counts are reported.
        repeats: answers to each prompt, of which the fastest counts.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        samples: Sequence[Sample],
        lengths: Sequence[int],
        max_tokens: int,
        repeats: int = 1,
        ignore_eos: bool = False,
    ) -> None:
        self._servers, self._samples, self._lengths = servers, samples, sorted(lengths)
        self._max_tokens, self._repeats, self._ignore_eos = max_tokens, repeats, ignore_eos
        self._answers: dict[tuple[str, int], dict[str, Answer]] = {}  # (server, length) -> sample -> answer

    @property
    def ticks(self) -> int:
        """Answers that are asked for."""
        return len(self._servers) * len(self._samples) * len(self._lengths)

    def measure(self) -> Iterator[str]:
        """Asks; yields what is asked next, before it is."""
        characters = CHARACTERS
        for length in self._lengths:
            for sample in self._samples:
                prompt = _cut(sample, length, characters)
                for name, server in self._servers.items():
                    yield f"{name}, {length:,} tokens, {sample.origin}"
                    runs = [server.answer(prompt, self._max_tokens, self._ignore_eos) for _ in range(self._repeats)]
                    best = max(runs, key=lambda run: run.tokens_per_second or 0.0)
                    self._answers.setdefault((name, length), {})[f"{sample.dataset} {sample.origin}"] = best
                    if best.prompt_tokens:
                        characters = len(prompt) / best.prompt_tokens

    def document(self, complete: bool) -> dict[str, Any]:
        """The report, with the keys of :func:`longdraft.bench.length.document`."""
        rows = [
            self._row(name, length, self._answers[name, length])
            for length in self._lengths
            for name in self._servers
            if (name, length) in self._answers
        ]
        models = [f"{name}: {server.model} at {server.url}" for name, server in self._servers.items()]
        return {"rows": rows, "free": [], "notes": models, **circumstances(), "complete": complete}

    def _row(self, name: str, length: int, own: Mapping[str, Answer]) -> dict[str, Any]:
        plain = self._answers.get((REFERENCE, length), {})
        accepted = 1.0 if name == REFERENCE else median_of(a.mean_accepted_length for a in own.values())
        speedup = median_of(
            ratio(a.tokens_per_second, plain[key].tokens_per_second) for key, a in own.items() if key in plain
        )
        # accepted / tokens/s is a round's seconds, and 1 / the plain server's tokens/s a step's.
        needed = ratio(accepted, speedup)
        return {
            "method": name,
            "length": length,
            "rope_factor": None,
            "context_tokens": round(mean(a.prompt_tokens for a in own.values())),
            "prompts": len(own),
            "mean_accepted_length": accepted,
            "tokens_per_second": median_of(a.tokens_per_second for a in own.values()),
            "speedup_vs_ar": speedup,
            "ttft_seconds": median_of(a.first_token_seconds for a in own.values()),
            "break_even": needed,
            "pays": None if needed is None or accepted is None else accepted > needed,
        }


def _cut(sample: Sample, length: int, characters: float) -> str:
    """A prompt of about so many tokens."""
    rest = [part for part in (sample.preface, sample.instruction) if part]
    room = max(1, round(length * characters) - sum(map(len, rest)))
    return sample.cut(room).text
