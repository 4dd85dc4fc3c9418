"""Measures papers' tables with the machinery of ``longdraft bench``, and sets the paper's figures beside ours.

``scaled``: a table at a scale, and its plan; ``texts``: its prompts; ``measures``: a function for each kind of
table; ``run``: a table ready to be measured, and its report. May import: the rest of ``bench``.
"""
