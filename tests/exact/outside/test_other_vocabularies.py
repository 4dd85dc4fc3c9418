"""Small language models with another tokenizer than the target's draft for it: tokens are matched by their text."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longdraft import Sampling, Speculator, load
from longdraft.cli.main import main
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.errors import CheckpointError
from longdraft.model.runner import TargetRunner
from tests.support.tiny import tiny_model

TEXTS = ["the cat and the hat sat on the mat\n", "a rat sat at the table and ate the bat\n\n", "that is that, then\n"]
SETTINGS = {"greedy": Sampling(0.0), "drawn": Sampling(1.0)}
METHODS = {
    "small-lm": {"depth": 4, "top_k": 3, "nodes": 8},
    "specextend": {"sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2},
    "triforce": {"chunk": 4, "sink": 4, "budget": 24, "window": 4, "streamed": 30},
}


def byte_level(size: int) -> PreTrainedTokenizerFast:
    """As Llama 3 and Qwen have it: "Ġthe"."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=inner, extra_special_tokens=["<|end|>"])


def sentencepiece(size: int) -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: "▁the", and "<0x0A>" for a byte that is no token."""
    inner = Tokenizer(models.BPE(byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    data = [text.replace("\n", "") for text in TEXTS]  # so a line's end is a byte
    inner.train_from_iterator(data, trainers.BpeTrainer(vocab_size=size, special_tokens=["<s>", "<|end|>"]))
    inner.add_tokens([AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


def plain_text(size: int) -> PreTrainedTokenizerFast:
    """Characters alone, in another order than bytes have."""
    vocab = {character: i for i, character in enumerate(dict.fromkeys("".join(TEXTS)[::-1]))}
    inner = Tokenizer(models.WordLevel(vocab | {"<unk>": len(vocab)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


TOKENIZERS = {"byte-level": (byte_level, 296), "sentencepiece": (sentencepiece, 60), "plain": (plain_text, 0)}
PAIRS = [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level"), ("byte-level", "plain")]


def text_of(token: str) -> str:
    """What an ASCII token stands for."""
    if token.startswith("<0x"):
        return chr(int(token[3:5], 16))
    return token.translate({ord("Ġ"): " ", ord("Ċ"): "\n", ord("▁"): " "})


def pair(folder, target_kind, draft_kind, **over):
    """A target and the folder of its draft: the target's own layers, with the rows of the tokens that both have."""
    (make, size), (make_other, other_size) = TOKENIZERS[target_kind], TOKENIZERS[draft_kind]
    tokenizer, other = make(size), make_other(other_size)
    vocab, other_vocab = tokenizer.get_vocab(), other.get_vocab()
    by_text = {text_of(token): i for token, i in sorted(vocab.items(), key=lambda item: item[1])}
    sizes = {"layers": 2, "seed": 2, "context": 512}
    model, draft = tiny_model(vocab=len(vocab), **sizes), tiny_model(vocab=len(other_vocab), **sizes, **over)
    shared = {i: by_text[text_of(token)] for token, i in other_vocab.items() if text_of(token) in by_text}
    draft.model.layers, draft.model.norm = model.model.layers, model.model.norm
    unlike = [i for token, i in vocab.items() if not text_of(token).isascii()]
    with torch.no_grad():
        model.lm_head.weight[unlike] = 0  # seldom written: these tokens are bytes of other alphabets
        for ours, theirs in ((model.lm_head, draft.lm_head), (model.model.embed_tokens, draft.model.embed_tokens)):
            theirs.weight[list(shared)] = ours.weight[list(shared.values())]
    for name, saved, its in (("target", model, tokenizer), ("draft", draft, other)):
        saved.save_pretrained(folder / name)
        its.save_pretrained(folder / name)
    return load(folder / "target", device="cpu"), folder / "draft", len(shared)


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize(
    ("kinds", "method"), [(kinds, "small-lm") for kinds in PAIRS] + [(PAIRS[0], m) for m in METHODS]
)
def test_text_is_the_targets_own_and_equal_tokens_are_proposed(tmp_path, kinds, method, sampling):
    (model, tokenizer), draft, _ = pair(tmp_path, *kinds)
    prompts = [tokenizer(text).input_ids for text in (TEXTS[0] * 3, "the rat\n", "zebra é " + TEXTS[1])]
    settings = {"max_new_tokens": 40, "sampling": SETTINGS[sampling], "seed": 5}
    found = Speculator(method, target=model, draft=draft, **METHODS[method]).generate(prompts, **settings)
    plain = Speculator("ar", target=model).generate(prompts, **settings)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    drafted, accepted = sum(r.drafted for r in found), sum(r.accepted for r in found)
    assert drafted >= accepted > 0 and all(r.exact for r in found)
    assert drafted > accepted or method == "triforce"  # its last drafter is the target on most of so short a text


def test_a_draft_that_computes_what_the_target_does_is_right(tmp_path):
    """As far as tokens are in both vocabularies: their text decides, not their number or spelling."""
    (model, tokenizer), draft, _ = pair(tmp_path, *PAIRS[0])
    (result,) = Speculator("small-lm", target=model, draft=draft, tree="chain", depth=4).generate(
        [tokenizer(TEXTS[0]).input_ids], max_new_tokens=60
    )
    shared = {text_of(token) for token in load(draft, device="cpu").tokenizer.get_vocab()}
    num_shared = sum(text_of(token) in shared for token in tokenizer.convert_ids_to_tokens(result.token_ids))
    assert num_shared > 10 and result.accepted > num_shared / 3


def test_what_is_fed_and_proposed(tmp_path):
    """BOS stands for the first token, if the draft has one: drafts that were trained with it are lost without."""
    (model, tokenizer), draft, num_shared = pair(tmp_path, *PAIRS[0], bos_token_id=0)
    small, other = load(draft, device="cpu")
    bound = SmallLMDraft.load(draft).bind(TargetRunner(model))
    store, tokens = bound.runner.new_store(1, 64), tokenizer("the cat sat\n<|end|>").input_ids
    batch = bound.translate(store.make_forward_batch([0], [tokens]))
    spelled = other.convert_ids_to_tokens(batch.token_ids[0, 1:])
    assert batch.token_ids[0, 0] == 0 and [*map(text_of, spelled)] == [
        text_of(token) for token in tokenizer.convert_ids_to_tokens(tokens[1:])
    ]
    found = bound.runner.forward(batch, store).logits[0]
    with torch.no_grad():
        expected = small(batch.token_ids).logits[0]
    rows = [other.convert_tokens_to_ids(name) for name in ("▁the", "<0x0A>", "<|end|>")]
    names = tokenizer.convert_ids_to_tokens(bound.draft_to_target_ids)
    places = [names.index(name) for name in ("Ġthe", "Ċ", "<|end|>")]
    torch.testing.assert_close(found[:, places], expected[:, rows])
    assert len(set(names)) == len(names) >= num_shared


def test_a_token_that_the_draft_lacks_is_fed_as_its_end(tmp_path):
    (model, tokenizer), draft, _ = pair(tmp_path, *PAIRS[2])
    bound, other = SmallLMDraft.load(draft).bind(TargetRunner(model)), load(draft, device="cpu").tokenizer
    tokens = tokenizer(TEXTS[0]).input_ids
    batch = bound.translate(bound.runner.new_store(1, 64).make_forward_batch([0], [tokens]))
    fed = other.convert_ids_to_tokens(batch.token_ids[0])
    assert fed == [text_of(token)[-1] for token in tokenizer.convert_ids_to_tokens(tokens)] and len(fed) < len(TEXTS[0])


@pytest.mark.parametrize("unknown", ["target", "draft"])
def test_where_tokens_cannot_be_matched_it_is_said(tmp_path, unknown):
    (model, _), draft, _ = pair(tmp_path, *PAIRS[0])
    for file in (tmp_path / unknown).glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=str(tmp_path / unknown)):
        Speculator("small-lm", target=model, draft=draft).generate([[1, 2]])
    assert json.loads((draft / "config.json").read_text())["vocab_size"] != model.config.vocab_size


def test_the_doctor_says_what_is_shared(tmp_path, capsys):
    _, draft, num_shared = pair(tmp_path, *PAIRS[2])
    assert main(["doctor", "--model", str(tmp_path / "target"), "--draft", str(draft), "--json"]) in (0, None)
    (entry,) = [
        each for each in json.loads(capsys.readouterr().out.splitlines()[-1])["drafts"] if each["name"] == str(draft)
    ]
    assert entry["fits"] and str(num_shared) in entry["remarks"][0]
