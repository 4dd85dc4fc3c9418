"""Planning of rounds: how much to draft and to verify, from measured costs and learned acceptance probabilities.

May import: engine, trees, model.
"""
