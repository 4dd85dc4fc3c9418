"""Views of long texts, which see some rows alone: layouts, scorers, copies and rings of KV rows.

May import: model, memory, attention, native.
"""
