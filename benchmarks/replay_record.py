"""Records what replay.py replays: outputs, and what a draft proposes at each of their positions.

    python benchmarks/replay_record.py FILE... --out FOLDER [--context 1000 2000 4000] [--rows 0-7] [--tokens 128]
        [--temperature 0 1] [--method longspec] [-o view=streaming]

What is emitted does not depend on what is drafted. So one run that verifies nothing, and emits a token a round, shows
the draft's largest tree at each position. A lookup needs no recording: it follows from the tokens. Each FILE is JSONL
as `longdraft bench --data` takes it; each prompt becomes one JSON file in FOLDER, and those that are there are left
alone. costs.json is what verifications cost here.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, cast

import longdraft
from longdraft import Sampling, Speculator
from longdraft.bench.data import fitted, read
from longdraft.cli.method_options import method_options
from longdraft.drafts.kinds import KINDS
from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.memory.prompt_cache import PromptCache
from longdraft.planning.costs import table_for
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.tree import TokenTree


class Notes:
    """Before a drafter in the order of its classes: notes the largest tree that a planner could ask for, and proposes
    nothing."""

    last: ClassVar[Notes]

    def __init__(self, draft: Any, **options: Any) -> None:
        super().__init__(draft, **options)  # type: ignore[call-arg]
        self.use_planner()  # type: ignore[attr-defined]
        Notes.last = self
        self.trees: list[TokenTree] = []
        self.seconds: list[float] = []

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        start, drafter = time.perf_counter(), cast(Drafter, self)
        before = drafter.forwards
        self.trees += super().propose(sequences, limit)  # type: ignore[misc]
        if drafter.forwards > before:
            self.seconds.append((time.perf_counter() - start) / (drafter.forwards - before))
        return [TokenTree((s.output[-1],), (-1,)) for s in sequences]


def record(spec: Speculator, prompt: list[int], tokens: int, temperature: float, cache: PromptCache) -> dict[str, Any]:
    """One output, the draft's tree at each of its positions but the last, and seconds of a draft forward and a step."""
    sampling = Sampling(temperature=temperature) if temperature else None
    run = spec.stream([prompt], max_new_tokens=tokens, sampling=sampling, seed=0, cache=cache)
    rounds = [step.seconds for step in run if step.mode != "prefill"]
    seen = Notes.last
    return {
        "temperature": temperature,
        "prompt": prompt,
        "output": run.results()[0].token_ids,
        "draft_forward_seconds": median(seen.seconds) if seen.seconds else None,
        "round_seconds": median(rounds) if rounds else None,
        "trees": [
            {"tokens": t.tokens, "parents": t.parents, "log_probs": [round(x, 3) for x in t.log_probs]}
            for t in seen.trees
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="a folder, a GGUF file or a name; the embedded model if left out")
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 2000, 4000])
    parser.add_argument("--rows", default="0-7", help="first and last row of each file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--method", default="longspec", help="its draft comes with the model, or as -o draft=DIR")
    parser.add_argument("-o", dest="options", action="append", default=[], help="an option of the method, name=value")
    options = parser.parse_args()
    first, last = map(int, options.rows.split("-"))
    model, tokenizer = longdraft.load(options.model)
    given = method_options(options.method, options.options)
    recorder: Any = type("Recorder", (Notes, KINDS[options.method].drafter), {})
    longdraft.compose("recorded", lambda draft: recorder(draft, **given), draft=options.method)
    spec = Speculator("recorded", target=model, tokenizer=tokenizer, plan="fixed")
    options.out.mkdir(parents=True, exist_ok=True)
    costs = table_for(spec.runner(), progress=print)
    assert costs is not None
    (options.out / "costs.json").write_text(json.dumps(asdict(costs)))
    for row in range(first, last + 1):
        for path in options.files:
            sample = read([path], row + 1)[row]
            for context in options.context:
                prompt, cache = fitted(sample, tokenizer, context), PromptCache()
                for temperature in options.temperature:
                    file = options.out / f"{path.stem}-{context}-{row}-T{temperature:g}.json"
                    if not file.exists():
                        about = {"data": path.stem, "context": context, "row": row}
                        file.write_text(json.dumps(about | record(spec, prompt, options.tokens, temperature, cache)))
                        print(file.name, flush=True)


if __name__ == "__main__":
    main()
