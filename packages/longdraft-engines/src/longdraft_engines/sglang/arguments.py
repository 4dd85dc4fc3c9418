"""SGLang's server arguments: LONGSPEC fills some in and refuses others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longdraft.drafters.longspec import LongSpecDraft
from longdraft.errors import CapabilityError, RequestError

# Nodes of a tree, with its root.
DRAFT_TOKENS = 32
# The most requests at a time, as of SGLang's NGRAM: drafting costs a few forwards of one block in each step.
RUNNING = 48
# The width of trees, for SGLang's attention: any above one means that they branch.
BRANCHES = 2


def settle(server_args: Any) -> None:
    """Checks SGLang's ``ServerArgs``, and fills in missing ones.

    Raises:
        RequestError: there is no draft, or a tree has one node.
        CheckpointError: the draft's folder is not one.
        CapabilityError: LONGSPEC does not support such a server.
    """
    a = server_args
    if a.speculative_draft_model_path is None:
        raise RequestError("LONGSPEC needs a draft: --speculative-draft-model-path FOLDER.")
    LongSpecDraft.load(Path(a.speculative_draft_model_path))
    _refuse(a)
    if a.speculative_num_draft_tokens is None:
        a.speculative_num_draft_tokens = DRAFT_TOKENS
    if a.speculative_num_draft_tokens < 2:
        raise RequestError(
            f"--speculative-num-draft-tokens {a.speculative_num_draft_tokens} is no more than a root: LONGSPEC takes "
            "2 or more."
        )
    a.speculative_eagle_topk = BRANCHES
    # A request reserves places for 2 * width * steps tokens, or for two trees if that is more.
    a.speculative_num_steps = a.speculative_num_draft_tokens // BRANCHES
    a.max_running_requests = a.max_running_requests or RUNNING
    a.enable_mixed_chunk = False
    if a.device == "cpu":
        a.disable_overlap_schedule = True


def _refuse(a: Any) -> None:
    for flag, size in (("--tp-size", a.tp_size), ("--pp-size", a.pp_size), ("--dp-size", a.dp_size)):
        if size > 1:
            raise CapabilityError(f"LONGSPEC drafts for a model on one device, not {flag} {size}: use NGRAM.")
    if a.page_size not in (None, 1) and a.attention_backend != "flashinfer":
        raise CapabilityError(
            f"LONGSPEC's trees are verified with --page-size 1, or with --attention-backend flashinfer; this server "
            f"has pages of {a.page_size} and {a.attention_backend}."
        )
    if a.kv_cache_dtype not in ("auto", "bfloat16", "bf16"):
        raise CapabilityError(f"LONGSPEC reads no KV of --kv-cache-dtype {a.kv_cache_dtype}: leave it at auto.")
    if a.speculative_adaptive:
        raise CapabilityError("LONGSPEC's trees have one size: leave --speculative-adaptive out.")
    if a.disaggregation_mode != "null":
        raise CapabilityError("LONGSPEC reads the KV where prompts were read: no --disaggregation-mode.")
    if a.device not in ("cuda", "cpu"):
        raise CapabilityError(f"LONGSPEC runs on CUDA devices and CPUs, not on {a.device}.")
