"""Files of requests, answered as the server answers them.

May import: everything but the command line.
"""
