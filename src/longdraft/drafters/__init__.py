"""Drafters propose token trees. Each file holds one drafter, its module and its loading.

May import: drafts, planning, engine, trees, views, model.
"""
