"""The measurement of batches, with right and wrong contenders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longdraft import LoadedModel, PromptCache, Sampling, Speculator
from longdraft.bench import report
from longdraft.bench.contenders import MethodContender, SharedPrefill
from longdraft.bench.data import Sample
from longdraft.bench.prompts import encode_prompts, make_batches
from longdraft.bench.run import Bench
from tests.bench import measuring
from tests.bench.measuring import settings
from tests.support.drafts import random_eagle3
from tests.support.slow_marks import slow
from tests.support.tiny import tiny_model, tiny_tokenizer

SAMPLES = [
    Sample(text, "", name, f"{name}.jsonl:{i}")
    for i, (text, name) in enumerate(
        [("one two one two", "a"), ("three four three four three", "a"), ("five six " * 12, "a"), ("seven", "b")], 1
    )
]


def measured(loaded, wanted, samples=SAMPLES, extra=()):
    return measuring.measured(loaded, wanted, samples, extra=extra)


def rows(loaded, wanted, samples=SAMPLES):
    bench, found = measured(loaded, wanted, samples)
    return report.rows(bench.names, found)


class Altered(MethodContender):
    """``ar`` with some of its tokens replaced.

    Args:
        alter: position -> bits of the token to flip.
    """

    def __init__(self, loaded, alter):
        spec = Speculator("ar", target=loaded.model, tokenizer=loaded.tokenizer)
        super().__init__("altered", spec, SharedPrefill(PromptCache()))
        self.alter = alter

    def decode_warm(self, job):
        run = super().decode_warm(job)
        change = [tuple(t ^ self.alter.get(i, 0) for i, t in enumerate(tokens)) for tokens in run.tokens]
        return replace(run, tokens=tuple(change))


def altered_report(loaded, alter):
    """The JSON report of ``ar`` and an altered ``ar``, and the latter's row of the first data set."""
    bench, found = measured(loaded, settings(methods=("ar",), ignore_eos=True), extra=[Altered(loaded, alter)])
    report_ = report.document(bench.names, found)
    (row,) = [r for r in report_["rows"] if (r["method"], r["dataset"]) == ("altered", "a")]
    return report_, row


@pytest.mark.parametrize(
    "over",
    [
        {"batches": (2,)},
        slow({"sampling": Sampling(repetition_penalty=1.3)}),
        {"sampling": Sampling(0.8, top_k=9, top_p=0.9, min_p=0.01), "seed": 3},
    ],
    ids=str,
)
def test_methods_and_generate_agree_with_ar(loaded, over):
    before = (loaded.model.generation_config, loaded.model.config._attn_implementation)
    found = rows(loaded, settings(methods=("prompt-lookup", "hf", "ar", "hf", "hf-eager"), **over))
    assert [row["method"] for row in found[:4]] == ["ar", "prompt-lookup", "hf", "hf-eager"]
    assert [(row["mismatches"], row["near_ties"]) for row in found] == [(0, 0)] * len(found)
    assert (found[0]["mean_accepted_length"], found[0]["speedup_vs_ar"]) == (1.0, 1.0)
    assert (loaded.model.generation_config, loaded.model.config._attn_implementation) == before


def test_batches_of_generate_sample_other_tokens_and_one_token_has_no_speed(loaded):
    found = rows(
        loaded, settings(methods=("prompt-lookup", "hf"), sampling=Sampling(1.0), batches=(2,), max_tokens=1)
    )  # fmt: skip
    assert [row["mismatches"] for row in found] == [0, 0, None]
    assert all(row["tokens_per_second"] is None and row["speedup_vs_ar"] is None for row in found)
    assert all(row["ttft_seconds"] > 0 for row in found)


def test_depths_spread_and_memory(loaded):
    bench, found = measured(loaded, settings(methods=("prompt-lookup",), repeats=2), samples=SAMPLES[:2])
    rounds = {"ar": [], "prompt-lookup": [(2, 7), (0, 4), (1, 3), (3, 3), (0, 2), (0, 0)]}
    speeds = {"ar": [(10.0, 20.0), (30.0, 40.0)], "prompt-lookup": [(20.0, 20.0), (90.0, 40.0)]}
    for i, m in enumerate(found):
        for name, runs in m.rounds.items():
            for j, run in enumerate(list(runs)):
                seconds = (run.new_tokens - 1) / speeds[name][i][j]
                runs[j] = replace(run, decode_seconds=seconds, accepted=tuple(rounds[name]))
    ar, lookup = report.rows(bench.names, found)
    assert ar["depth_accepted"] == []
    assert lookup["depth_accepted"] == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    # Of the rounds, then of the samples.
    assert (ar["tokens_per_second"], lookup["tokens_per_second"]) == pytest.approx((25, 42.5))
    assert lookup["speedup_vs_ar"] == pytest.approx((20 / 15 + 65 / 35) / 2)
    # Round by round, medians of two samples: 20 and 30 for ar, 55 and 30 for lookup.
    assert ar["tokens_per_second_spread"] == pytest.approx([20, 30])
    assert lookup["tokens_per_second_spread"] == pytest.approx([30, 55])
    assert ar["speedup_vs_ar_spread"] == [1, 1]
    assert lookup["speedup_vs_ar_spread"] == pytest.approx([1.0, 2.5])
    peaks = [m.peak_memory_bytes for m in found]
    expected = max(p["ar"] for p in peaks) if peaks[0]["ar"] is not None else None
    assert ar["peak_memory_bytes"] == expected


def test_differences_are_reported_and_near_ties_counted_apart(loaded):
    report_, row = altered_report(loaded, {5: 8})
    assert (row["mismatches"], row["near_ties"]) == (3, 0)
    first = report_["differences"][0]
    assert (first["method"], first["sample"], first["position"]) == ("altered", "a.jsonl:1", 5)
    assert first["token"] == first["reference"] ^ 8 and first["gap"] > 1e-3
    (line, *_) = report.make_report(report_, loaded.tokenizer.decode).remarks
    assert line.plain.startswith("MISMATCH: altered on a.jsonl:1, new token 6")
    assert all(r["mismatches"] == 0 for r in report_["rows"] if r["method"] == "ar")
    model = tiny_model(vocab=64, context=512, layers=2)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[1::2] = head[::2]
    report_, row = altered_report(LoadedModel(model, loaded.tokenizer), {2: 1})
    assert (row["mismatches"], row["near_ties"]) == (0, 3)
    assert report.make_report(report_).remarks[0].plain.startswith("near tie: altered")


def test_the_order_turns_round_and_the_prompt_is_read_once_each(loaded, forwards):
    wanted = settings(methods=("prompt-lookup", "hf"), repeats=3)
    prompts = encode_prompts(SAMPLES[:1], loaded, wanted)
    bench, order = Bench(loaded, wanted), []
    bench.measure(prompts, order.append)
    names = ["ar", "prompt-lookup", "hf"]
    assert order == names + names + names[::-1] + names
    assert len(order) == bench.steps([prompts])[0].runs_per_record
    read = [f.rows for f in forwards if f.logits != "all"]
    assert read == [len(prompts[0].token_ids)] * 2 + [1] * 6


def test_generate_starts_from_its_kept_prompt(loaded):
    wanted = settings(methods=("hf",), max_tokens=4, ignore_eos=True)
    (prompt,) = encode_prompts(SAMPLES[2:3], loaded, wanted)
    bench, lengths = Bench(loaded, wanted), []
    peer, job = bench.contenders["hf"], bench.make_job([prompt.token_ids], 4)
    embedding = loaded.model.get_input_embeddings()
    with embedding.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1])):
        runs = [peer.decode_cold(job), peer.decode_warm(job), peer.decode_warm(job)]
    assert runs[1].tokens == runs[2].tokens and lengths == [len(prompt.token_ids)] + 11 * [1]
    assert (runs[1].rounds, runs[1].token_counts) == ((3,), [(3, 3)])


def eos_model():
    """A model that emits EOS after a few tokens (with this seed)."""
    tokenizer = tiny_tokenizer(chat=True)
    model = tiny_model(context=512, layers=2)
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer.eos_token_id] *= 4
    return LoadedModel(model, tokenizer)


def test_the_end_of_sequence_ends_all_contenders_alike():
    loaded = eos_model()
    wanted = settings(methods=("prompt-lookup", "hf"), max_tokens=24)
    bench, found = measured(loaded, wanted, samples=SAMPLES[:2])
    eos = loaded.tokenizer.eos_token_id
    outputs = [m.cold["ar"].tokens[0] for m in found]
    assert any(len(tokens) < 24 and tokens[-1] == eos for tokens in outputs)
    assert all(row["mismatches"] == 0 for row in report.rows(bench.names, found))
    bench, found = measured(loaded, replace(wanted, ignore_eos=True), samples=SAMPLES[:2])
    for m in found:
        assert {len(run.tokens[0]) for run in m.cold.values()} == {24}
    assert all(row["mismatches"] == 0 for row in report.rows(bench.names, found))


def test_one_prefill_serves_all_of_ours(loaded, tmp_path):
    """Drafts read hidden states that ar's prefill has cached for them."""
    draft = random_eagle3(tmp_path, loaded.model, layers=(0, 1), feature_size=2 * loaded.model.config.hidden_size)
    wanted = settings(methods=("prompt-lookup", "eagle3", "hf"), cold=False, draft_options={"draft": draft})
    bench = Bench(loaded, wanted)
    groups, _ = make_batches(encode_prompts(SAMPLES[:2], loaded, wanted), (1,))
    ticks = []
    measured = [bench.measure(group, lambda name, prefilled=0: ticks.append(name)) for group in groups]
    assert len(ticks) == sum(step.runs_per_record for step in bench.steps(groups)) == 2 * (2 + 4 * wanted.repeats)
    for row in report.document(bench.names, measured)["rows"]:
        assert row["mismatches"] == 0
        assert (row["ttft_seconds"] is None) == (row["method"] in ("prompt-lookup", "eagle3"))


def test_rows_say_how_much_a_draft_sees(loaded):
    """The view has the sizes in effect, defaults too, though the tiny model's context is shorter."""
    names = ("self", "self:view=chunks:budget=64", "specpv:drafter=self", "specpv:drafter=ar", "quantspec")
    own = {names[1]: {"view": "chunks", "budget": 64}, names[2]: {"drafter": "self"}, names[3]: {"drafter": "ar"}}
    found = rows(loaded, settings(methods=names, contender_options=own, cold=False), samples=SAMPLES[:1])
    assert [row["method"] for row in found] == ["ar", *names]
    assert [row["mismatches"] for row in found] == [0, 0, 0, None, None, 0]  # specpv is approximate
    partial, own_view = "1,184 = 32 + 64 to 256 x 16 + 128", "2,048 = 16 + 250 x 8 + 32"
    assert [row["view"] for row in found] == [
        None, own_view, "64 = 16 + 2 x 8 + 32", f"{own_view}; {partial}", partial, None
    ]  # fmt: skip
    (_, shown), *_ = report.make_report({"rows": found, "differences": [], "notes": {}}).tables
    assert "view" in [column.header for column in shown.columns]


def test_each_contender_may_have_a_plan_of_its_own(loaded):
    planned = "prompt-lookup:plan=auto"
    wanted = settings(
        methods=("prompt-lookup", planned), plan="fixed", max_tokens=40, ignore_eos=True,
        contender_options={planned: {"plan": {1: 1e-9, 2: 1.0}}},  # a second row costs an age
    )  # fmt: skip
    accepted = {r["method"]: r["mean_accepted_length"] for r in rows(loaded, wanted, SAMPLES[2:3])}
    assert accepted[planned] == 1.0 < accepted["prompt-lookup"]
    with pytest.raises(ValueError, match="plan"):
        settings(plan="best")


def test_a_contender_may_round_its_kv_and_shares_it_with_those_that_round_alike(loaded):
    names = ("prompt-lookup", "ar:kv_dtype=int8", "prompt-lookup:kv_dtype=int8")
    wanted = settings(methods=names, contender_options={name: {"kv_dtype": "int8"} for name in names[1:]}, cold=False)
    bench = Bench(loaded, wanted)
    prefill = [c.prefill for c in bench.contenders.values()]
    assert prefill[0] is prefill[1] and prefill[2] is prefill[3] and prefill[0] is not prefill[2]
    found = rows(loaded, wanted, samples=SAMPLES[:1])
    assert [row["mismatches"] for row in found] == [0, 0, None, None]
    with pytest.raises(ValueError, match="kv_dtype"):
        settings(contender_options={"ar": {"kv_dtype": "int3"}}, methods=("ar",))
