"""Which rows of a long text are seen: layouts, scorers, copies and rings of KV rows.

May import: model, memory, attention, native.
"""
