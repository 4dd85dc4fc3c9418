"""Refuses the names under which drafters for other engines were imported when they were part of this package."""

raise ImportError(
    "longdraft.plugins is a package of its own: pip install ./packages/longdraft-engines, and name "
    "longdraft_engines.vllm.Lookup (LongSpec, SpecExtend)."
)
