"""How much to draft and to verify: costs measured on this machine, chances learned from what is accepted.

May import: engine, trees, model.
"""
