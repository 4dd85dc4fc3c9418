"""The command line, a file a verb.

May import: everything.
"""
