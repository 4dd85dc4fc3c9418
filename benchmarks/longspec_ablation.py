"""Loss and agreement of LongSpec drafts on held-out long text, by position: what anchor-offset indices, noisy
training and the window do.

    python benchmarks/longspec_ablation.py DATA.jsonl NAME=DRAFT_DIR... [--length 6144] [--documents 12]

Text rows of DATA are cut to --length tokens and read at plain positions. For each draft and each span of positions:
the cross-entropy against the text's next token (nats, in the draft's vocabulary, at shift j = 1), and how often the
draft's first choice is the target's own (argmax), at shifts 1 and 4. Held out means: DATA was not trained on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import longdraft
from longdraft.drafters import draft_folder
from longdraft.drafters.longspec_block import LongSpecBlock, LongSpecShape
from longdraft.target.parts import shared_parts
from longdraft.target.runner import TargetRunner
from longdraft.training.documents import Document, Skipped, documents
from longdraft.training.features import FeatureReader, Features
from longdraft.training.longspec import LongSpecTrainee

SPANS = (0, 512, 1024, 2048, 3072, 4096, 6144, 8192)


class _Probe(LongSpecTrainee):
    """Keeps each row's loss apart."""

    @torch.no_grad()
    def rows(self, document: Features, shift: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, losses against the text, and agreement with the target's argmax, a number a row."""
        self.distill = 0.0
        hidden = self.hidden([document], [shift])
        first = max(document.start - 1, shift)
        logits = (hidden.to(self._head.dtype) @ self._head.T).float()
        truth = self._to_draft[document.tokens[first + 1 :]]
        argmax = self._to_draft[document.top_ids[first + 1 - document.start :, 0]]
        inside = truth >= 0
        loss = torch.logsumexp(logits, -1) - logits.gather(1, truth.clamp_min(0)[:, None])[:, 0]
        positions = document.positions[first : len(document.tokens) - 1]
        return positions[inside], loss[inside], (logits.argmax(-1) == argmax)[inside]


def probe(folder: str, parts: object) -> _Probe:
    """A draft folder, as training sees it."""
    found = draft_folder.load(folder)
    names = LongSpecShape.__dataclass_fields__
    block = LongSpecBlock(LongSpecShape(**{k: v for k, v in found.config.items() if k in names}))
    block.load_state_dict({k: v.float() for k, v in found.tensors.items() if k != "d2t"})
    d2t = found.tensors.get("d2t")
    kept = None if d2t is None else d2t + torch.arange(len(d2t))
    return _Probe(block, parts, kept, head_dtype=torch.bfloat16)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("drafts", nargs="+", help="NAME=DRAFT_DIR")
    parser.add_argument("--length", type=int, default=6144)
    parser.add_argument("--documents", type=int, default=12)
    options = parser.parse_args()
    model, tokenizer = longdraft.load(dtype="bfloat16")
    runner = TargetRunner(model)
    texts = (
        Document(d.tokens[: options.length])
        for d in documents([options.data], tokenizer, Skipped(), runner.vocab_size)
        if len(d.tokens) >= options.length
    )
    reader = FeatureReader(runner, 1)
    read = [reader.read(d) for d, _ in zip(texts, range(options.documents), strict=False)]
    print(f"{len(read)} documents of {options.length} tokens")
    drafts = {}
    for word in options.drafts:
        name, _, folder = word.partition("=")
        drafts[name] = probe(folder, shared_parts(model))
    spans = [s for s in SPANS if s <= options.length]
    results = []
    for name, draft in drafts.items():
        with torch.autocast("cpu", torch.bfloat16):
            found = {j: [torch.cat(x) for x in zip(*(draft.rows(d, j) for d in read), strict=True)] for j in (1, 4)}
        for low, high in zip(spans, spans[1:], strict=False):
            where = {j: (p >= low) & (p < high) for j, (p, _, _) in found.items()}
            row = {
                "draft": name,
                "positions": f"{low}-{high}",
                "loss": float(found[1][1][where[1]].mean()),
                "agreement_1": float(found[1][2][where[1]].float().mean()),
                "agreement_4": float(found[4][2][where[4]].float().mean()),
            }
            results.append(row)
            print(
                f"{name:20} {row['positions']:>10}  loss {row['loss']:.3f}  agreement {row['agreement_1']:.3f} (j=1) "
                f"{row['agreement_4']:.3f} (j=4)",
                flush=True,
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
