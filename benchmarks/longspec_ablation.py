"""Loss and agreement of LongSpec drafts on held-out long text, by position: what anchor-offset indices, noisy
training and the window do.

    python benchmarks/longspec_ablation.py DATA.jsonl NAME=DRAFT_DIR... [--length 6144] [--documents 12]

Text rows of DATA are cut to --length tokens and read at plain positions. For each draft and each span of positions:
the cross-entropy against the text's next token (nats a token, those outside the draft's vocabulary counted as 0, at
shift j = 1), and how often the draft's first choice is the text's next token, at shifts 1 and 4. DATA is text that
the drafts were not trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path

import torch

import longdraft
from longdraft.drafters.longspec import LongSpecBlock, LongSpecDraft
from longdraft.drafts import draft_folder
from longdraft.model.runner import TargetRunner
from longdraft.model.shared_parts import SharedParts, shared_parts
from longdraft.training.documents import Document, Skipped, documents
from longdraft.training.features import FeatureReader, Features
from longdraft.training.longspec import LongSpecTrainee

SPANS = (0, 512, 1024, 2048, 3072, 4096, 6144, 8192)


def probe(folder: str, parts: SharedParts) -> LongSpecTrainee:
    """A draft folder, as training sees it."""
    contents = draft_folder.load(folder)
    draft = LongSpecDraft(folder, contents)
    block = LongSpecBlock(draft.shape)
    block.load_state_dict({name: contents.tensors[name].float() for name in block.state_dict()})
    return LongSpecTrainee(block, parts, draft.ids, product_dtype=torch.bfloat16).eval()


def span(document: Features, low: int, high: int) -> Features:
    """The document up to ``high``, with nothing before ``low`` learned."""
    start = max(low, document.start)
    rows = slice(start - document.start, high - document.start)
    return dataclasses.replace(
        document,
        tokens=document.tokens[:high],
        start=start,
        keys=document.keys[:, :high],
        values=document.values[:, :high],
        top_ids=document.top_ids[rows],
        top_log_probs=document.top_log_probs[rows],
    )


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
        for low, high in itertools.pairwise(spans):
            pieces = [span(d, low, high) for d in read]
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                near, far = (draft(pieces, [j] * len(pieces)) for j in (1, 4))
            row = {
                "draft": name,
                "positions": f"{low}-{high}",
                "loss": float(near.loss / len(near.depths)),
                "agreement_1": float((near.ranks == 0).float().mean()),
                "agreement_4": float((far.ranks == 0).float().mean()),
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
