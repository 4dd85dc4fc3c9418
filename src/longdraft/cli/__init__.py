"""The command line: one file for each command, and what commands share (options, console, progress).

May import: everything.
"""
