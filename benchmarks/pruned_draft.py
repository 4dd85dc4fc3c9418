"""A pruned draft: some layers of a small language model, distilled on a target's answers, as a GGUF file.

    python benchmarks/pruned_draft.py SMALL.gguf ANSWERS.jsonl --keep 0-6,15-23 [--out DRAFT.gguf --cpu-minutes 4]

SMALL is a dense GGUF model with the target's vocabulary; ANSWERS is what `longdraft train data` wrote, with features.
Agreement and simulated acceptance on the held-out documents (docs/training.md) are printed before, while and after it
learns; without --out nothing is trained. A step learns a passage and some answers to it, which read it once: a tree of
texts under a mask. The file keeps embedding and head as SMALL has them: drafts propose from the first token ids with
`-o vocabulary=N`, and so does this. `--draft DRAFT.gguf` takes it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import gguf
import torch
from safetensors import safe_open
from torch import nn

from longdraft.model import hosting
from longdraft.model.loading import load
from longdraft.model.small_models import GIVEN, hidden_states
from longdraft.training import corpus, tokens
from longdraft.training.config import DEPTH
from longdraft.training.documents import Document, Skipped
from longdraft.training.features import Features
from longdraft.training.kept_features import passages
from longdraft.training.losses import soft_cross_entropy, targets
from longdraft.training.measure import UNSEEN, by_text, simulate
from longdraft.training.trainee import StepOutput

TOGETHER = 4  # answers of a step
EIGHT_BITS = gguf.GGMLQuantizationType.Q8_0


@dataclass(frozen=True)
class Branched:
    """A passage and answers to it, laid end to end.

    Attributes:
        tokens, positions, owner: (T,) owner is 0 in the passage, 1, 2, ... in the answers.
        ids, log_probs: (T, K) the target's likeliest next tokens.
        learned: (N,) rows to learn.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    owner: torch.Tensor
    ids: torch.Tensor
    log_probs: torch.Tensor
    learned: torch.Tensor

    def rows(self, owner: int) -> torch.Tensor:
        """The rows of a document: the passage's, then its own."""
        return torch.nonzero((self.owner == 0) | (self.owner == owner))[:, 0]


def branched(documents: Sequence[Document], passage: bool) -> Branched:
    """The documents of one passage, of which the passage itself is learned only where asked for."""
    folder, number, _ = documents[0].kept or ("", 0, 0)
    with safe_open(Path(folder) / f"passage-{number:06d}.safetensors", "pt") as file:
        lengths = [int(n) for n in file.metadata()["lengths"].strip("[]").split(",")]
        read = {name: (file.get_tensor(f"passage.{name}"), file.get_tensor(f"answers.{name}").split(lengths))
                for name in ("tokens", "ids", "lps")}  # fmt: skip
    answers = [d.kept[2] for d in documents if d.kept and d.kept[2] >= 0]
    parts = {name: [first, *(rest[i] for i in answers)] for name, (first, rest) in read.items()}
    sizes = [len(part) for part in parts["tokens"]]
    begins = [0] + [sizes[0]] * len(answers)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    positions = torch.cat([begin + torch.arange(n) for begin, n in zip(begins, sizes, strict=True)])
    ids, log_probs = torch.cat(parts["ids"]).long(), torch.cat(parts["lps"]).float()
    learned = torch.arange(0 if passage else sizes[0] - 1, len(owner))
    return Branched(torch.cat(parts["tokens"]).long(), positions, owner, ids, log_probs, learned)


class Pruned(nn.Module):
    """Some layers of a language model between its embedding and the first rows of its head, which stay as they are.

    Args:
        beside: layers that learn on each side of a gap; the others stay as they are.
    """

    def __init__(self, file: Path, keep: Sequence[int], vocabulary: int, beside: int) -> None:
        super().__init__()
        model = load(str(file), weights="float32").model
        self.decoder = hosting.decoder_of(model)
        layers = hosting.decoder_layers(model)
        self.decoder.layers = nn.ModuleList(layers[i] for i in keep)
        self.decoder.config._attn_implementation = GIVEN
        self.decoder.config.num_hidden_layers = len(keep)
        self.embedding = [model.get_input_embeddings()]  # in a list: not trained
        self.decoder.embed_tokens = None
        self.head = model.get_output_embeddings().weight[:vocabulary].detach().bfloat16()
        gaps = [n for n, (i, after) in enumerate(pairwise(keep)) if after != i + 1]
        learning = {n for gap in gaps for n in range(gap - beside + 1, gap + beside + 1)}
        for n, layer in enumerate(self.decoder.layers):
            layer.requires_grad_(n in learning)

    def forward(self, text: Branched) -> torch.Tensor:
        """(T, hidden) behind the final norm."""
        at = torch.arange(len(text.tokens))
        mask = (at[:, None] >= at) & ((text.owner[:, None] == text.owner) | (text.owner == 0))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            return nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask)[0]

        with torch.no_grad():
            x = self.embedding[0](text.tokens).float()
        with torch.autocast("cpu", torch.bfloat16):
            return hidden_states(self.decoder, x, text.positions, attend)

    def loss(self, text: Branched) -> torch.Tensor:
        """Mean cross-entropy of the learned rows against the target's likeliest tokens, of those in the vocabulary."""
        hidden, ids = self(text)[text.learned], text.ids[text.learned]
        ids = torch.where(ids < len(self.head), ids, -1)
        labels = targets(ids[:, 0], ids, text.log_probs[text.learned], 1.0)
        return soft_cross_entropy(hidden, self.head, *labels)[0] / len(hidden)


@torch.no_grad()
def measured(model: Pruned, groups: Sequence[Sequence[Document]]) -> str:
    """Agreement and simulated acceptance, as a line."""
    ranks: dict[int, torch.Tensor] = {}
    documents = []
    none = torch.empty(0)
    for group in groups:
        text = branched(group, True)
        hidden, owner = model(text), 0
        for document in group:
            answer = document.kept is not None and document.kept[2] >= 0
            owner += answer
            rows = text.rows(owner if answer else 0)[document.start - 1 : len(document.tokens) - 1]
            wanted = torch.tensor(document.tokens[document.start :])
            inside = torch.where(wanted < len(model.head), wanted, 0)[:, None]
            found = soft_cross_entropy(hidden[rows], model.head, inside, none.new_zeros(inside.shape))[1]
            documents.append(Features(torch.tensor(document.tokens), document.start, 0, {}, none, none))
            ranks[id(documents[-1])] = torch.where(wanted < len(model.head), found, UNSEEN - 1)

    def trainee(given: Sequence[Features], _shifts: Sequence[int]) -> StepOutput:
        return StepOutput(none, ranks[id(given[0])], none)

    found = simulate(trainee, [(d, True) for d in documents], ranks_of=by_text)
    return f"agreement {found.agreement[0]:.3f}, chain {found.chain:.2f}, tree {found.tree:.2f}"


def grouped(documents: Sequence[Document]) -> list[list[Document]]:
    """Documents by their passage: the passage itself first."""
    groups: dict[int, list[Document]] = {}
    for document in sorted((d for d in documents if d.kept), key=lambda d: d.kept[1:]):
        groups.setdefault(document.kept[1], []).append(document)
    return list(groups.values())


def steps(groups: Sequence[list[Document]]) -> Iterator[tuple[list[Document], bool]]:
    """What a step learns, in a random order without end: some answers, and whether their passage too."""
    rng, units = random.Random(0), []
    for group in groups:
        answers = [d for d in group if d.kept and d.kept[2] >= 0]
        units += [(answers[i : i + TOGETHER], i == 0) for i in range(0, len(answers), TOGETHER)]
    while units:
        yield from rng.sample(units, len(units))


def train(
    model: Pruned, learned: list[list[Document]], held_out: list[list[Document]], seconds: float, lr: float
) -> None:
    """AdamW for so many CPU seconds, those of measuring apart; the rate rises at first and falls as a cosine."""
    parameters = [p for p in model.decoder.parameters() if p.requires_grad]
    decayed = [{"params": [p for p in parameters if p.ndim == n], "weight_decay": 0.1 * (n > 1)} for n in (1, 2)]
    optimizer = torch.optim.AdamW(decayed, lr, (0.9, 0.95), fused=True)
    used, rows, tenths = 0.0, 0, 1
    for step, (documents, passage) in enumerate(steps(learned), 1):
        begin = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, step / 3) * (1 + math.cos(math.pi * min(1, used / seconds))) / 2
        text = branched(documents, passage)
        loss = model.loss(text)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        used, rows = used + time.process_time() - begin, rows + len(text.learned)
        print(f"step {step}, {used:.0f} CPU seconds, {rows:,} tokens: loss {loss.item():.3f}", flush=True)
        if used >= seconds * tenths / 5:
            tenths += 1
            print(measured(model, held_out), flush=True)
        if used >= seconds:
            return


def write(model: Pruned, keep: Sequence[int], file: Path, out: Path) -> None:
    """SMALL's file with the kept layers alone: trained matrices in Q8_0, vectors in float32, the rest as stored."""
    reader = gguf.GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(None, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, value = field.types[0], field.contents()
        value = len(keep) if name == f"{architecture}.block_count" else value
        writer.add_key_value(name, value, kind, sub_type=field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known, trained = gguf.get_tensor_name_map(kind, len(keep)), set()
    for name, tensor in model.decoder.state_dict().items():
        its = known.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))
        trained.add(its)
        numbers = tensor.numpy()
        matrix = numbers.ndim > 1
        writer.add_tensor(
            its, gguf.quantize(numbers, EIGHT_BITS) if matrix else numbers, raw_dtype=EIGHT_BITS if matrix else None
        )
    for tensor in reader.tensors:
        if tensor.name not in trained and not tensor.name.startswith("blk."):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(out)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def layers_of(text: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]."""
    ends = [[int(n) for n in part.split("-")] for part in text.split(",")]
    return [i for each in ends for i in range(each[0], each[-1] + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", type=Path)
    parser.add_argument("answers")
    parser.add_argument("--keep", type=layers_of, required=True, help="layers, the first is 0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu-minutes", type=float, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--held-out", type=float, default=0.04)
    parser.add_argument("--beside", type=int, default=2, help="layers that learn on each side of a gap")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = tokens.sources((options.answers,), None, skipped := Skipped(), 1 << 31)
    source.append(tokens.Tokens.of(passages(d for each in source for d in each if d.kept)))
    limits = {"max_length": 2048, "min_length": 32, "shortest_learned": DEPTH, "held_out": options.held_out}
    data = corpus.collect(source, skipped, **limits)
    learned, held_out = grouped(list(data.learned)), grouped(list(data.held_out))
    model = Pruned(options.small, options.keep, options.vocabulary, options.beside)
    weights = sum(p.numel() for p in model.parameters())
    print(f"{len(options.keep)} layers, {weights / 1e6:.1f}M weights; {len(data.held_out)} documents held out")
    print(measured(model, held_out), flush=True)
    if options.out is not None:
        train(model, learned, held_out, 60 * options.cpu_minutes, options.lr)
        write(model, options.keep, options.small, options.out)


if __name__ == "__main__":
    main()
