"""Computes layers with our CPU kernels, all of a model in one call or one by one, and makes them batch invariant."""
