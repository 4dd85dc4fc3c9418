"""The decoding loop: requests and sequences, scheduling, planning, acceptance, the sampler, verifiers, results, and the
interface of drafters.

May import: planning, trees, views, model, memory, attention.
"""
