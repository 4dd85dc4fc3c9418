"""Speculative decoding inside transformers' own `generate`, on the embedded model.

Run with: python examples/transformers_generate.py
"""

import torch

import longdraft

target, tokenizer = longdraft.load(arithmetic="float32")  # as `generate` by itself computes
prompt = "Write a Python function that adds two numbers, and one that multiplies them."
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)

spec = longdraft.Speculator("prompt-lookup", target=target)
out = target.generate(**inputs, custom_generate=spec, max_new_tokens=96, do_sample=False)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

plain = target.generate(**inputs, max_new_tokens=96, do_sample=False)
print("\nSame tokens as generate alone:", torch.equal(out, plain))
