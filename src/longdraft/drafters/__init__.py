"""Drafters propose token trees. Each file holds one drafter, its module and its loading.

May import: drafts, engine, trees, views, model.
"""
