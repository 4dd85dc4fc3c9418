"""LONGSPEC in SGLang's own engine and scheduler, on a CPU, with the embedded model: `make test-sglang` runs this.

Greedy text equals that of SGLang without drafts, whatever is cached, retracted or aborted; acceptance is our own
engine's. What stands in for SGLang's compiled operators is in `sglang_on_cpu`.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from importlib.resources import files

import pytest

from embedded import assert_accepted_as_here, folder, loaded, prompts
from sglang_on_cpu import engine

from sglang.srt.arg_groups.overrides import resolved_view  # isort: skip  # after what stands in for its kernels
from sglang.srt.plugins import load_plugins  # isort: skip
from sglang.srt.speculative.spec_registry import get_spec  # isort: skip

__all__ = ["folder", "loaded", "prompts"]  # fixtures

NEW, NODES, CONTEXT = 48, 8, 1024
STOPS = [30, 198]  # a full stop, a new line
DRAFT = str(files("longdraft") / "drafts/smollm2-135m-instruct-longspec")
LONGSPEC = {
    "speculative_algorithm": "LONGSPEC", "speculative_draft_model_path": DRAFT, "speculative_num_draft_tokens": NODES
}  # fmt: skip


@pytest.fixture(scope="session")
def plain(folder, prompts):
    with running(folder) as made:
        return tokens(generated(made, prompts)), others(made, prompts)


@contextmanager
def running(folder, **settings):
    """SGLang's engine. Prompts are read in chunks."""
    settings = {"max_total_tokens": 8192, "chunked_prefill_size": 256} | settings
    made = engine(model_path=folder, context_length=CONTEXT, max_running_requests=8, page_size=1, **settings)
    try:
        yield made
    finally:
        made.shutdown()


def generated(made, prompts, **sampling):
    return_logprob = sampling.pop("return_logprob", False)
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True} | sampling
    return made.generate(input_ids=prompts, sampling_params=sampling, return_logprob=return_logprob)


def tokens(found):
    return [one["output_ids"] for one in found]


def others(made, prompts):
    """Texts that end early, follow a grammar, fill the context; and probabilities."""
    scored = generated(made, prompts[:3], return_logprob=True)
    longest = (prompts[4] * 3)[: CONTEXT - NEW - 3]
    return {
        "stop": tokens(generated(made, prompts, stop_token_ids=STOPS, max_new_tokens=2 * NEW)),
        "regex": tokens(generated(made, prompts[:3], regex=r"[a-z ]{10,40}\.", ignore_eos=False)),
        "longest": tokens(generated(made, [longest, prompts[0]])),
        "scores": [[round(score, 2) for score, *_ in one["meta_info"]["output_token_logprobs"]] for one in scored],
    }


def accepted(found):
    """Mean accepted length of a round, with the bonus token."""
    counts = [one["meta_info"] for one in found]
    return 1 + sum(c["spec_num_correct_drafts"] for c in counts) / sum(c["spec_verify_ct"] for c in counts)


def test_sglangs_own_ngrams(folder, prompts, plain):
    with running(folder, speculative_algorithm="NGRAM", speculative_num_draft_tokens=NODES) as made:
        found = generated(made, prompts)
    assert tokens(found) == plain[0] and accepted(found) > 1


@pytest.mark.parametrize("caching", [True, False])
def test_longspec_with_and_without_the_radix_cache(loaded, folder, prompts, plain, caching):
    with running(folder, disable_radix_cache=not caching, **LONGSPEC) as made:
        generated(made, prompts)
        found = generated(made, prompts)
    assert tokens(found) == plain[0] and all(bool(one["meta_info"]["cached_tokens"]) == caching for one in found)
    options = {"draft": DRAFT, "tree": "beam", "nodes": NODES - 1}
    assert_accepted_as_here(accepted(found), loaded, "longspec", prompts, NEW, **options)


def test_longspec_where_requests_are_retracted(folder, prompts, plain):
    with running(folder, max_total_tokens=1600, schedule_conservativeness=0.1, **LONGSPEC) as made:
        found = generated(made, prompts)
    assert tokens(found) == plain[0] and any(one["meta_info"]["num_retractions"] for one in found)


def test_longspec_where_texts_end_early_are_bound_or_fill_the_context(folder, prompts, plain, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_SGLANG_SLOTS", "3")
    with running(folder, **LONGSPEC) as made:
        assert others(made, prompts) == plain[1]


def test_longspec_where_requests_are_aborted(folder, prompts, plain):
    async def some_aborted(made):
        def start(i, name, new=NEW):
            sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
            return asyncio.ensure_future(made.async_generate(input_ids=prompts[i], sampling_params=sampling, rid=name))

        going = [start(i, str(i), 6 if i == 0 else NEW) for i in range(6)]
        await going[0]
        for name in ("1", "3"):
            made.tokenizer_manager.abort_request(name)
        going += [start(i, str(i)) for i in (6, 7)] + [start(1, "1 again")]
        return await asyncio.gather(*going)

    with running(folder, **LONGSPEC) as made:
        found = made.loop.run_until_complete(some_aborted(made))
        assert made.flush_cache().success
        assert tokens(generated(made, prompts[:2])) == plain[0][:2]
    reasons = [one["meta_info"]["finish_reason"]["type"] for one in found]
    assert [i for i, reason in enumerate(reasons) if reason == "abort"] == [1, 3]
    for one, whole in zip(tokens(found), [*plain[0], plain[0][1]], strict=True):
        assert one == whole[: len(one)]
    assert [len(one) for i, one in enumerate(tokens(found)) if i not in (0, 1, 3)] == [NEW] * 6


def test_longspec_with_the_overlapped_schedule(folder, prompts, plain, monkeypatch):
    """On CPUs LONGSPEC and SGLang's own algorithms switch it off; here it is left on, as on a GPU."""
    load_plugins()
    algorithm = get_spec("LONGSPEC")
    settle = algorithm.validate_server_args

    def overlapped(server_args):
        settle(server_args)
        server_args.disable_overlap_schedule = False

    monkeypatch.setattr(algorithm, "validate_server_args", overlapped)
    with running(folder, **LONGSPEC) as made:
        assert not resolved_view(made.server_args).disable_overlap_schedule
        assert tokens(generated(made, prompts)) == plain[0] and others(made, prompts) == plain[1]
