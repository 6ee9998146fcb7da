"""Layers of a model, chosen and checkpointed."""
