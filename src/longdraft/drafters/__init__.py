"""What proposes token trees, a file each: module, loading, drafter, registration.

May import: drafts, engine, trees, views, model.
"""
