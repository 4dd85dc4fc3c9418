"""Planning of rounds: how much to draft and to verify, by costs measured here and chances learned from acceptance.

May import: engine, trees, model.
"""
