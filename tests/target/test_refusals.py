"""Models that cannot be hosted exactly are refused, and numbers that are none are errors."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV2Config,
    DogeConfig,
    Gemma2Config,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from longdraft.errors import NumericalError, UnsupportedModelError
from longdraft.target.runner import TargetRunner
from tests.tiny import tiny_model


def text(n: int, seed: int = 0, vocab: int = 61) -> list[int]:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- refusals ---


def test_mistral_with_a_window_is_refused_by_the_kind_of_its_layers():
    with pytest.raises(UnsupportedModelError, match="MistralForCausalLM has layers of the kind sliding_attention"):
        TargetRunner(tiny_model("mistral", sliding_window=8))


def test_a_qwen2_with_some_sliding_layers_is_refused():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM has layers of the kind sliding_attention"):
        TargetRunner(model)


def test_a_qwen2_that_does_not_use_its_window_is_hosted():
    assert TargetRunner(tiny_model("qwen2", use_sliding_window=False, sliding_window=8)).vocab_size == 61


def test_linear_attention_layers_are_refused_by_name():
    model = tiny_model("qwen3")
    model.config.layer_types = ["linear_attention", "full_attention", "mamba"]
    with pytest.raises(UnsupportedModelError, match="of the kind linear_attention, mamba"):
        TargetRunner(model)


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        TargetRunner(T5ForConditionalGeneration(config))


def test_capped_attention_scores_are_refused():
    config = Gemma2Config(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="Gemma2ForCausalLM uses attn_logit_softcapping"):
        TargetRunner(AutoModelForCausalLM.from_config(config))


def test_a_model_outside_the_attention_interface_is_refused(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(UnsupportedModelError, match="does not go through transformers' attention interface"):
        TargetRunner(model)


def test_a_layer_that_mixes_tokens_without_the_interface_is_noticed(monkeypatch):
    model = tiny_model()
    runner = TargetRunner(model)
    mixer = model.model.layers[1].self_attn
    monkeypatch.setattr(mixer, "forward", lambda hidden_states, **_: (hidden_states.cumsum(1), None))
    with pytest.raises(UnsupportedModelError, match="sent 2 of its 3 layers"):
        runner.forward([[1, 2]], runner.new_store(1, 8), [0])


def test_a_layer_that_drops_keyword_arguments_is_noticed(monkeypatch):
    model = tiny_model()
    runner = TargetRunner(model)
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda longdraft_hosted=None, **kept: forward(**kept))
    with pytest.raises(UnsupportedModelError, match="does not hand keyword arguments on"):
        runner.forward([[1, 2]], runner.new_store(1, 8), [0])


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "s_aux", "position_bias"])
def test_an_attention_option_that_is_not_hosted_is_noticed(monkeypatch, option):
    model = tiny_model()
    runner = TargetRunner(model)
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda **given: forward(**given, **{option: 4}))
    with pytest.raises(UnsupportedModelError, match=f"LlamaAttention uses {option}"):
        runner.forward([[1, 2]], runner.new_store(1, 8), [0])


def hosted_once(config: PreTrainedConfig) -> None:
    runner = TargetRunner(AutoModelForCausalLM.from_config(config))
    runner.forward([[1, 2]], runner.new_store(1, 8), [0])


def test_attention_under_a_mask_of_its_own_is_noticed():
    """Doge selects keys by a mask that it computes from the values."""
    config = DogeConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="DogeAttention does not attend to the whole text"):
        hosted_once(config)


def test_attention_that_looks_ahead_is_noticed():
    """BERT as a causal LM, without is_decoder=True."""
    config = BertConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="BertSelfAttention does not attend to the whole text"):
        hosted_once(config)


def test_latent_attention_is_noticed():
    """DeepSeek's keys are wider than its values."""
    config = DeepseekV2Config(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, first_k_dense_replace=2, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"DeepseekV2Attention has keys .*latent attention"):
        hosted_once(config)


@pytest.mark.parametrize("logits", ["all", "last"])
def test_nan_logits_are_an_error_that_says_what_to_do(logits):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    runner = TargetRunner(model)
    with pytest.raises(NumericalError, match="dtype='bfloat16' or 'float32'"):
        runner.forward([[1, 2, 3]], runner.new_store(1, 8), [0], logits=logits)


def test_nan_logits_of_a_drafter_are_not_looked_for():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    runner = TargetRunner(model)
    assert runner.forward([[1, 2, 3]], runner.new_store(1, 8), [0], check=False).logits.isnan().any()


def test_a_masked_vocabulary_is_not_an_error():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda m, i, logits: logits.index_fill(-1, torch.tensor([4]), -torch.inf))
    runner = TargetRunner(model)
    logits = runner.forward([[1, 2, 3]], runner.new_store(1, 8), [0]).logits
    assert (logits[..., 4] == -torch.inf).all()
