"""Measures papers' tables with the benchmarks of this package, and reports the papers' figures beside ours.

``scaled``: a table at a scale, and the class of plans; ``sources``: the prompts of a table; ``measures``: the plan of
each kind of table; ``run``: prepares and reports a table. May import: the rest of ``bench``.
"""
