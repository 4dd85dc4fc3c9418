"""Measurements: data sets, peers, runs, results, reports.

May import: everything but the command line and the server.
"""
