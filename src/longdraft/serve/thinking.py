"""Separates what a model thinks, in ``<think>`` tags, from its answer."""

from __future__ import annotations

THINK, UNTHINK = "<think>", "</think>"
