"""Planning of rounds: decides how much to draft and to verify, by measured costs and learned acceptance probabilities.

May import: engine, trees, model.
"""
