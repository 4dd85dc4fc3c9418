"""Measures papers' tables with the benchmarks of this package, and reports the paper's figures beside ours.

``scaled``: a table at a scale, and the plan of its measurement; ``sources``: its prompts; ``measures``: a plan for each
kind of table; ``run``: a table ready to be measured, and its report. May import: the rest of ``bench``.
"""
