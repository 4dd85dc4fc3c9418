"""A server with OpenAI's and Anthropic's APIs.

May import: everything but the command line.
"""
