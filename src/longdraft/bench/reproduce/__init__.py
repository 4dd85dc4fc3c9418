"""Measures papers' tables with the benchmarks of this package, and reports the paper's figures beside ours.

``scaled``: a table at the paper's or the small scale, and the type of plans; ``sources``: the prompts of a table;
``measures``: plans by kind of table; ``run``: a prepared table and its report. May import: the rest of ``bench``.
"""
