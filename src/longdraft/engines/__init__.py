"""Our drafters inside other engines."""
