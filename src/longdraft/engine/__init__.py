"""The decoding loop: requests and sequences, results, acceptance, the sampler, verifiers, and the interfaces of
drafters and planners.

May import: trees, views, model, memory, attention.
"""
