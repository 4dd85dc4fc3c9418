"""Files of requests, decoded here or by Ray workers.

May import: everything but the command line.
"""
