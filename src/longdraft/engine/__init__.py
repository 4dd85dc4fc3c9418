"""The algorithm: the loop, what goes in (requests, sequences) and out (events, results), acceptance, the sampler,
the schedules, and the contracts of a drafter and a planner.

May import: trees, views, model, memory, attention.
"""
