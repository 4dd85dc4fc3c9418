"""Hidden states that vLLM extracted, read in place of a forward of the target.

With the method ``extract_hidden_states``, vLLM's ``ExampleHiddenStatesConnector`` writes a safetensors file for each
request: ``token_ids`` (T,) and ``hidden_states`` (T, layers, hidden size), for the layers that
``eagle_aux_hidden_state_layer_ids`` names. vLLM counts what goes into a layer, longdraft what comes out of it: vLLM's
i is our i - 1, and the number of layers stands for the last one's output, before the final norm.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from pathlib import Path

import torch

from longdraft.errors import CheckpointError, ConfigError
from longdraft.files import opened
from longdraft.model.runner import TargetRunner
from longdraft.training.documents import Document
from longdraft.training.features import CHUNK, FeatureReader, Features
from longdraft.training.trainee import rows_of

ADVICE = "Extract it again, or delete it with its row of the data."
# Tokens of a file that the target reads too, to see whether the states are those of the layers.
PROBE = 16


class ExtractedStates(FeatureReader):
    """Reads the features of documents from files; one serves every document that its tokens begin with.

    Args:
        folder: of the files. Others are those of :class:`FeatureReader`.

    Raises:
        ConfigError: the draft reads keys and values.
        CheckpointError: there are no files, one is damaged, or its states are not those of the draft's layers.
    """

    def __init__(
        self, runner: TargetRunner, dtype: torch.dtype, layers: tuple[int, ...] | None, folder: Path | str
    ) -> None:
        if layers == ():
            raise ConfigError("hidden_states: this draft reads keys and values, which are not in them. Leave it out.")
        super().__init__(runner, dtype, layers, last=True)
        self.folder, found = Path(folder), list[tuple[bytes, Path]]()
        for path in sorted(self.folder.rglob("*.safetensors")):
            with opened(path, ADVICE) as file:
                found.append((_key(file.get_tensor("token_ids").tolist()), path))
        if not found:
            raise CheckpointError(f"hidden_states: {folder} has no safetensors files; name the connector's folder.")
        # In order of their tokens, so that those that begin alike lie side by side.
        self._files, self._head = sorted(found), rows_of(runner.parts.head, None)
        self._check()

    @torch.no_grad()
    def compute(self, document: Document, offset: int) -> Features:
        tokens, start = document.tokens, document.start
        # Nothing is learned from the last token's row, which vLLM does not compute for the end of an answer of its own.
        known = _key(tokens[:-1])
        place = bisect_left(self._files, (known, Path()))
        if place == len(self._files) or not self._files[place][0].startswith(known):
            raise CheckpointError(
                f"hidden_states: {self.folder} lacks a text of {len(tokens)} tokens that begins with {tokens[:8]}. "
                "Extract the rows of data by their token ids, or leave those rows out; max_length must not cut texts."
            )
        states = self._states(self._files[place][1])[: len(tokens)].flatten(1)
        states = torch.nn.functional.pad(states, (0, 0, 0, len(tokens) - len(states)))
        last = states[start - 1 : -1, -self.runner.parts.hidden_size :].to(self.runner.device)
        each = (self.runner.parts.normed(x) for x in last.split(CHUNK))
        likeliest = [(x @ self._head.to(x.dtype).T).argmax(-1) for x in each]
        return Features(torch.tensor(tokens), start, offset, self.named(states.to(self.dtype)), torch.cat(likeliest))

    def _states(self, path: Path) -> torch.Tensor:
        """(tokens, layers, hidden size)."""
        with opened(path, ADVICE) as file:
            states: torch.Tensor = file.get_tensor("hidden_states")
        wanted, ids = (len(self.taps), self.runner.parts.hidden_size), [layer + 1 for layer in self.taps]
        if states.ndim != 3 or tuple(states.shape[1:]) != wanted:
            raise CheckpointError(
                f"{path} has hidden_states {tuple(states.shape)}, where this draft reads (tokens, {wanted[0]}, "
                f"{wanted[1]}): extract with eagle_aux_hidden_state_layer_ids {ids}, or set feature_layers."
            )
        if not states.isfinite().all():
            raise CheckpointError(f"{path} has hidden_states that are no numbers. {ADVICE}")
        return states

    def _check(self) -> None:
        """Raises CheckpointError if a layer's states in a file are nearer to those of another."""
        key, path = max(self._files, key=lambda file: len(file[0]))
        tokens, states = array("i", key).tolist()[:PROBE], self._states(path)[:PROBE].float()
        every = FeatureReader(self.runner, torch.float32, tuple(range(self.runner.depth)))
        own = every.read(Document(tokens)).hidden.unflatten(1, (self.runner.depth, -1))
        embedded = self.runner.parts.embedding(torch.tensor(tokens, device=own.device))
        inputs = torch.cat([embedded[:, None].float(), own], 1).cpu()  # of each layer, and the last one's output
        for i, layer in enumerate(self.taps):
            # Without the first token, whose states are large and alike in many layers.
            nearest = int((inputs - states[:, i, None])[1:].square().sum((0, 2)).argmin())
            if nearest != layer + 1:
                raise CheckpointError(
                    f"{path}: states {i} are those of vLLM's layer {nearest}, where this draft reads {layer + 1}: "
                    f"extract with eagle_aux_hidden_state_layer_ids {[tap + 1 for tap in self.taps]}, from this target."
                )


def _key(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()
