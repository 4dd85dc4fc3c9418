"""Writes a GGUF file of Qwen3.5's architecture with random weights, for measurements beside llama.cpp.

    python benchmarks/shape_gguf.py OUT.gguf --tokenizer MODEL.gguf [--format Q4_K] [--layers 32] [--hidden 1024]
        [--inner 3072] [--heads 4] [--kv-heads 1] [--head-dim 256] [--key-heads 4] [--value-heads 8] [--state 128]
    llama-bench -m OUT.gguf        longdraft bench --model OUT.gguf --methods ar --data FILE

The usual shape has the depth of Qwen3.5-9B (32 layers, every fourth of full attention, the others gated DeltaNet) and a
quarter of its width. The vocabulary and the tokenizer are those of another file. Texts mean nothing, but do not repeat.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from longdraft.model.gguf_writing import TargetFile

EVERY, KERNEL = 4, 4
# Random numbers of a block are spread evenly; this is their deviation where the scale is 1.
SPREAD = {"Q8_0": 73.0, "Q4_K": 4.61 * 32}


def blocks(rng: np.random.Generator, outs: int, size: int, kind: str) -> np.ndarray:
    """A random matrix (outs, bytes of a row) with a mean of 0 and a deviation of size ** -0.5."""
    import gguf

    count, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (outs * size // count, length), dtype=np.uint8)
    scale = size**-0.5 / SPREAD[kind]
    if kind == "Q8_0":
        data[:, :2] = np.array([scale], dtype=np.float16).view(np.uint8)
    else:
        # Weights are scale * s * q - 7.5 * scale * s, with s from 24 to 39 in 6 bits and q from 0 to 15.
        data[:, :4] = np.array([scale, 7.5 * scale], dtype=np.float16).view(np.uint8)
        s = rng.integers(24, 40, (len(data), 8), dtype=np.uint8)
        low, high = s[:, :4], s[:, 4:]
        data[:, 4:8] = data[:, 8:12] = low | high >> 4 << 6
        data[:, 12:16] = high & 15 | (high & 15) << 4
    return data.reshape(outs, -1)


def write(args: argparse.Namespace) -> None:
    import gguf

    target = TargetFile(args.tokenizer)
    rng = np.random.default_rng(args.seed)
    writer = gguf.GGUFWriter(args.out, "qwen35")
    keys, values = args.key_heads * args.state, args.value_heads * args.state
    for add, value in (
        (writer.add_name, "Random"), (writer.add_block_count, args.layers), (writer.add_context_length, args.context),
        (writer.add_embedding_length, args.hidden), (writer.add_feed_forward_length, args.inner),
        (writer.add_head_count, args.heads), (writer.add_head_count_kv, args.kv_heads),
        (writer.add_key_length, args.head_dim), (writer.add_value_length, args.head_dim),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 1e7),
        (writer.add_rope_dimension_count, args.head_dim // 4), (writer.add_rope_dimension_sections, [11, 11, 10, 0]),
        (writer.add_ssm_conv_kernel, KERNEL), (writer.add_ssm_state_size, args.state),
        (writer.add_ssm_group_count, args.key_heads), (writer.add_ssm_time_step_rank, args.value_heads),
        (writer.add_ssm_inner_size, values), (writer.add_full_attention_interval, EVERY),
        (writer.add_vocab_size, target.tokens), (writer.add_quantization_version, gguf.GGML_QUANT_VERSION),
    ):  # fmt: skip
        add(value)
    file_type = {"Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "Q4_K": gguf.LlamaFileType.MOSTLY_Q4_K_M}
    writer.add_file_type(file_type[args.format])
    target.copy_tokenizer(writer)

    def matrix(name: str, outs: int, size: int) -> None:
        data = blocks(rng, outs, size, args.format)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[args.format])

    def floats(name: str, data: np.ndarray) -> None:
        writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))

    matrix("token_embd", target.tokens, args.hidden)
    matrix("output", target.tokens, args.hidden)
    floats("output_norm.weight", np.ones(args.hidden))
    for layer in range(args.layers):
        at = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm"):
            floats(f"{at}.{name}.weight", np.ones(args.hidden))
        matrix(f"{at}.ffn_gate", args.inner, args.hidden)
        matrix(f"{at}.ffn_up", args.inner, args.hidden)
        matrix(f"{at}.ffn_down", args.hidden, args.inner)
        if (layer + 1) % EVERY == 0:
            matrix(f"{at}.attn_q", 2 * args.heads * args.head_dim, args.hidden)  # a query and its gate
            matrix(f"{at}.attn_k", args.kv_heads * args.head_dim, args.hidden)
            matrix(f"{at}.attn_v", args.kv_heads * args.head_dim, args.hidden)
            matrix(f"{at}.attn_output", args.hidden, args.heads * args.head_dim)
            for name in ("attn_q_norm", "attn_k_norm"):
                floats(f"{at}.{name}.weight", np.ones(args.head_dim))
        else:
            matrix(f"{at}.attn_qkv", 2 * keys + values, args.hidden)
            matrix(f"{at}.attn_gate", values, args.hidden)
            matrix(f"{at}.ssm_alpha", args.value_heads, args.hidden)
            matrix(f"{at}.ssm_beta", args.value_heads, args.hidden)
            matrix(f"{at}.ssm_out", args.hidden, values)
            floats(f"{at}.ssm_conv1d.weight", rng.normal(0, 0.5, (2 * keys + values, KERNEL)))
            floats(f"{at}.ssm_a", -rng.uniform(0.05, 1, args.value_heads))
            floats(f"{at}.ssm_dt.bias", rng.normal(-1, 1, args.value_heads))
            floats(f"{at}.ssm_norm.weight", np.ones(args.state))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", required=True, help="a GGUF file whose tokenizer and vocabulary are taken")
    parser.add_argument("--format", choices=SPREAD, default="Q4_K")
    for name, usual in (
        ("layers", 32), ("hidden", 1024), ("inner", 3072), ("heads", 4), ("kv-heads", 1), ("head-dim", 256),
        ("key-heads", 4), ("value-heads", 8), ("state", 128), ("context", 32768), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual, metavar="N", help=f"(default: {usual})")
    args = parser.parse_args()
    write(args)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
