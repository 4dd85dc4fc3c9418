"""Measures papers' tables with the machinery of ``longdraft bench``, and sets the paper's figures beside ours.

``scaled``: a table at a scale, its options and drafts; ``texts``: its prompts; ``speed``, ``needles``, ``quality``: a
file for each kind of table; ``run``: a table ready to be measured; ``report``: rows, tables, charts. May import: the
rest of ``bench``.
"""
