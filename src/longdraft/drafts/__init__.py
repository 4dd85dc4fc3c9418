"""Trained drafts on disk: folders, kinds, checks, other projects' formats, and the weights that ship.

May import: engine, model, native.
"""
