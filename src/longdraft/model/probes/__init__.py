"""Computes made-up inputs, to find out what configurations do not say: whether something else is computed."""
