"""Drafters propose token trees. A file each: module, loading, drafter, registration.

May import: drafts, engine, trees, views, model.
"""

import importlib

importlib.import_module("longdraft.methods")  # this module imports all drafters
