"""Answers files of requests as the server answers requests.

May import: everything but the command line.
"""
