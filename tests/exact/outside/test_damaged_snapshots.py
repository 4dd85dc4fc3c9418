"""A snapshot that is not what was written is read anew: the text stays what it is, and the file is named."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch

import longdraft
from longdraft.errors import CheckpointError
from tests.support.recurrent_models import recurrent_model
from tests.support.tiny import tiny_model

PROMPT = random.Random(7).choices(range(61), k=60)


class Decoder:
    """Decodes the prompt from a file, with drafts that read hidden states of the rows in it or none."""

    def __init__(self, model: torch.nn.Module, folder: Path) -> None:
        self.spec, self.file = longdraft.Speculator("prompt-lookup", target=model), folder / "kept"
        cache = longdraft.PromptCache()
        self.spec.generate(PROMPT, max_new_tokens=1, cache=cache)
        self.text = self.decoded(None)
        cache.save(self.file, self.spec.runner().fingerprint)
        self.written = self.file.read_bytes()

    def decoded(self, cache: longdraft.PromptCache | None) -> tuple[list[int], int]:
        (result,) = self.spec.generate([*PROMPT, 3, 1, 4], max_new_tokens=4, cache=cache)
        return result.token_ids, result.cached_tokens

    def again(self, content: bytes) -> int | None:
        """Cached tokens of a run from a file; None if it is refused by name. The text is always the same."""
        self.file.write_bytes(content)
        try:
            cache = longdraft.PromptCache.restored(self.file, self.spec.runner().fingerprint)
            text, cached = self.decoded(cache)
        except CheckpointError as error:
            assert str(self.file) in str(error)
            return None
        assert text == self.text[0]
        return cached


@pytest.fixture(scope="module", params=["attention", "recurrent"])
def decoder(request, tmp_path_factory):
    model = tiny_model() if request.param == "attention" else recurrent_model()
    return Decoder(model, tmp_path_factory.mktemp("kept"))


@pytest.mark.parametrize(("name", "dtype"), [("keys", "I32"), ("values", "I32"), ("keys", "U32"), ("tokens", "F64")])
def test_the_same_bytes_as_another_dtype_change_no_text(name, dtype, decoder):
    size = struct.unpack("<Q", decoder.written[:8])[0]
    header = json.loads(decoder.written[8 : 8 + size])
    header[name]["dtype"] = dtype
    told = json.dumps(header, separators=(",", ":")).encode()
    assert decoder.again(struct.pack("<Q", len(told)) + told + decoder.written[8 + size :]) in (0, None)


def test_a_flipped_bit_changes_no_text(decoder, caplog):
    assert decoder.again(decoder.written) == len(PROMPT)  # it is used as it is
    header = 8 + struct.unpack("<Q", decoder.written[:8])[0]
    chosen = random.Random(57)
    places = [chosen.randrange(header, len(decoder.written)) for _ in range(10)]
    found = [decoder.again(flipped(decoder.written, place, chosen.randrange(8))) for place in places]
    assert set(found) == {0}  # each is noticed, and the prompt is read anew
    assert len([r for r in caplog.records if str(decoder.file) in r.getMessage()]) == len(places)
    in_header = [
        decoder.again(flipped(decoder.written, chosen.randrange(header), chosen.randrange(8))) for _ in range(12)
    ]
    assert in_header.count(len(PROMPT)) <= 3  # spaces at its end say nothing


def test_a_file_that_is_cut_or_grown_changes_no_text(decoder):
    chosen = random.Random(58)
    for _ in range(5):
        cut = chosen.randrange(len(decoder.written))
        assert decoder.again(decoder.written[:cut]) in (None, 0)
    assert decoder.again(decoder.written + b"more") in (None, 0)


def flipped(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)
