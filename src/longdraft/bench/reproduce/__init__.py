"""Measures papers' tables with the machinery of ``longdraft bench``, and sets the paper's figures beside ours.

``scaled``: a table at a scale, its texts and drafts; ``speed``, ``needles``, ``quality``, ``training``: a file for each
kind of table; ``report``: rows, tables, charts. May import: the rest of ``bench``, and ``training``.
"""
