"""Costs measured on this machine and acceptance learned while decoding, by which the engine's planner plans.

May import: trees, model.
"""
