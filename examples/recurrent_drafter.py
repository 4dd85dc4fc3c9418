"""A trained drafter of your own in one file: a recurrent cell on the target's last hidden state.

    python examples/recurrent_drafter.py                      # trains it on a few answers of the embedded model
    longdraft generate --load examples/recurrent_drafter.py --draft recurrent-draft/best -p "Why is the sky blue?"
    longdraft train --load examples/recurrent_drafter.py recurrent data=answers.jsonl rows=2048

The state h_t of the target's last layer predicts token t+1, the root of the next round. A GRU cell continues there:

    s_0 = norm(h_t)    s_i = GRU(norm(embedding(token t+i)), s_{i-1})    p(token t+i+1) = softmax(head(norm(s_i)))

Embedding and head are the target's. The file has the five parts of any kind of draft: module, draft (the folder),
drafter (what it proposes), training, and the line that registers it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import longdraft
from longdraft.drafts.draft import TrainedDraft
from longdraft.drafts.kinds import Kind, Training
from longdraft.engine.drafter import Drafter, DraftNeeds
from longdraft.engine.sequence import Sequence as Text
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import parallel_linear
from longdraft.training.losses import soft_cross_entropy
from longdraft.training.trainer import DraftTrainer, StepOutput
from longdraft.trees.tree import NodeLimit, TokenTree

NAME, LEVELS = "recurrent", 4


# 1. The module: the same in training and in decoding.
class Cell(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.begin = nn.RMSNorm(hidden_size)  # of the target's state
        self.read = nn.RMSNorm(hidden_size)  # of a token's embedding
        self.cell = nn.GRUCell(hidden_size, hidden_size)
        self.norm = nn.RMSNorm(hidden_size)  # before the target's head

    def step(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """embedded, state (rows, hidden) -> the next state (rows, hidden)."""
        return self.cell(self.read(embedded), state)


# 2. The draft: a folder of weights. The base class reads, checks, refuses, binds and saves it.
@dataclass(frozen=True)
class Bound:
    """The module on a target: embedding (ids -> rows), head (rows -> logits), ids of the head's rows or None."""

    cell: Cell
    embedding: nn.Module
    head: Callable[[torch.Tensor], torch.Tensor]
    ids: torch.Tensor | None


class RecurrentDraft(TrainedDraft[Bound]):
    kind = NAME

    def module(self) -> Cell:
        return Cell(self.config["hidden_size"])

    def needs(self) -> dict[str, Any]:
        return {"hidden_size": self.config["hidden_size"]}

    def make(self, runner: TargetRunner) -> Bound:
        head, ids = self.head(runner)  # a matrix, or one as a GGUF file stores it
        return Bound(self.load_module(runner), runner.shared_parts.embedding, parallel_linear(head), ids)


# 3. The drafter: it proposes a chain. Whatever it proposes, the output stays the target's.
class RecurrentDrafter(Drafter):
    """Its keyword parameters are the method's options: ``-o depth=6``."""

    def __init__(self, draft: RecurrentDraft, depth: int = LEVELS) -> None:
        if type(depth) is not int or depth < 1:
            raise ValueError(f"depth must be a whole number of at least 1, got {depth!r}")
        self.draft, self.max_nodes = draft, depth

    def needs(self, runner: TargetRunner) -> DraftNeeds:
        return DraftNeeds(feature_layers=(runner.kv_shape.layers - 1,))

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self._bound, self._store = self.draft.bind(runner), store

    @torch.inference_mode()
    def propose(self, sequences: list[Text], limit: NodeLimit | None = None) -> list[TokenTree]:
        bound, features = self._bound, self._store.features
        assert features is not None
        # The root has no state yet: start from the state of the row before it.
        state = bound.cell.begin(torch.stack([features[s.slot, len(s.tokens) - 2] for s in sequences]))
        last = torch.tensor([s.output[-1] for s in sequences], device=state.device)
        token_ids, scores = [last], [torch.zeros(len(sequences), device=state.device)]
        for _ in range(self.max_nodes if limit is None else min(self.max_nodes, limit.max_nodes)):
            self.forwards += 1
            state = bound.cell.step(bound.embedding(last), state)
            logits = bound.head(bound.cell.norm(state))
            best, chosen = logits.float().log_softmax(-1).max(-1)
            last = chosen if bound.ids is None else bound.ids[chosen]
            token_ids.append(last)
            scores.append(best)
        chains = zip(torch.stack(token_ids, 1).tolist(), torch.stack(scores, 1).tolist(), sequences, strict=True)
        return [_chain(chain[: s.remaining], score[: s.remaining]) for chain, score, s in chains]


def _chain(token_ids: Sequence[int], logprobs: Sequence[float]) -> TokenTree:
    return TokenTree(tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), tuple(logprobs))


# 4. The training: one step, from documents' features to a loss; the project's loop does the rest. Modules that
#    need the extra `train` are imported when a run begins.
class CellTrainer(DraftTrainer):
    """The cell, reading the text's tokens from every learned state on, as deep as it will draft."""

    block: Cell
    label_shift = 2  # the token after a row's is the root, which the target predicts itself

    def forward(self, documents: Sequence[Any], shifts: Sequence[int] = (), levels: int = LEVELS) -> StepOutput:
        device = self.device
        hidden: list[list[torch.Tensor]] = [[] for _ in range(levels)]
        truth: list[list[torch.Tensor]] = [[] for _ in range(levels)]
        for document in documents:
            token_ids, first = document.token_ids.to(device), document.start - 1
            with torch.no_grad():
                embedded = self.parts.embedding(token_ids).float()
            state = self.block.begin(document.hidden[first : len(token_ids) - 2].to(device).float())
            for level in range(levels):
                rows = len(token_ids) - 2 - first - level  # rows that have a token this far ahead
                state = self.block.step(embedded[first + 1 + level :][:rows], state[:rows])
                hidden[level].append(self.block.norm(state))
                truth[level].append(self.target_to_draft[token_ids[first + 2 + level :]])
        depths = [torch.full((sum(map(len, each)),), i + 1) for i, each in enumerate(truth)]
        wanted = torch.cat([t for each in truth for t in each])
        states = torch.cat([h for each in hidden for h in each])
        loss, ranks = soft_cross_entropy(states, self.target_head, wanted)
        known = wanted >= 0  # the draft's vocabulary may lack a token
        return StepOutput(loss, torch.where(known, ranks, len(self.target_head)), torch.cat(depths).to(device))


def train(config: Any, progress: Callable[..., None] = lambda *_: None, stop: Callable[[], bool] = lambda: False):
    """Trains a cell; yields a report a step. ``config`` is a :class:`longdraft.training.config.RunConfig`."""
    from longdraft.training.features import head_rows
    from longdraft.training.loop import TrainingLoop
    from longdraft.training.session import TrainingSession

    session = TrainingSession(config, LEVELS, progress, stop)
    runner, kept = session.runner, session.vocabulary()
    torch.manual_seed(config.seed)
    cell = Cell(runner.shared_parts.hidden_size)
    # Logits of unit size at first: a fresh cell is then unsure, not sure and wrong.
    nn.init.constant_(
        cell.norm.weight, 1 / float(head_rows(runner.shared_parts.head, None).float().norm(dim=-1).median())
    )
    sizes = {"hidden_size": runner.shared_parts.hidden_size, "trained_length": config.max_length}
    trainer = CellTrainer(cell, runner.shared_parts, kept)
    layers = (runner.kv_shape.layers - 1,)  # whose output it reads
    yield from TrainingLoop(session, trainer, layers, NAME, sizes, levels=LEVELS, eval_levels=LEVELS).run()


# 5. From here on it is a method like any other, with or without --draft, under specpv, on the command line.
longdraft.register(
    Kind(
        NAME,
        RecurrentDrafter,
        "a recurrent cell that goes on from the model's last hidden state; examples/recurrent_drafter.py",
        load=RecurrentDraft.load,
        training=Training("longdraft.training.config:RunConfig", train, "Train a recurrent drafter"),
    )
)

QUESTIONS = ("Why is the sky blue?", "How do I boil an egg?", "What is a prime number?", "Why do cats purr?")


def main() -> None:
    """Learns four answers by heart and drafts them: a demonstration. A draft to use takes more text."""
    from longdraft.engine.chat import chat_prompt
    from longdraft.training.config import RunConfig

    model, tokenizer = longdraft.load()
    prompts = [chat_prompt(tokenizer, question) for question in QUESTIONS]
    answers = longdraft.Speculator("ar", target=model).generate(prompts, max_new_tokens=128)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "answers.jsonl")
        rows = [{"tokens": p + a.token_ids, "start": len(p)} for p, a in zip(prompts, answers, strict=True)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = RunConfig(
            data=(str(data),), out="recurrent-draft", cache=str(Path(folder, "features")), precision="no", rows=256,
            held_out=0.0, vocabulary=1024, epochs=10.0, lr=2e-3,
        )  # fmt: skip
        for report in train(config):
            print(f"step {report.step} of {report.steps}: loss {report.loss:.2f}, right: {report.agreement}")
    spec = longdraft.Speculator("recurrent-draft/best", target=model, tokenizer=tokenizer)
    for prompt, answer in zip(prompts, answers, strict=True):
        found = spec.generate([prompt], max_new_tokens=128)[0]
        same = "the same tokens" if found.token_ids == answer.token_ids else "other tokens"
        print(f"{found.mean_accepted_length:.2f} tokens a verification, {same} as without a draft")


if __name__ == "__main__":
    main()
