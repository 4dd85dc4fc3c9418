"""Drafters propose token trees. Each file holds one drafter: its module, its loading and its registration.

May import: drafts, engine, trees, views, model.
"""

import importlib

importlib.import_module("longdraft.methods")  # longdraft.methods imports every drafter, so that each one registers
