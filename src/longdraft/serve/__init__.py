"""A server that speaks OpenAI's API.

May import: everything but the command line.
"""
