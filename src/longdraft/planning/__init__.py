"""What the engine's planner plans by: costs measured on this machine, and acceptance learned while decoding.

May import: trees, model.
"""
