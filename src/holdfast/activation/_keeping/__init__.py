"""Activations kept by layer or for regions, in tiers, and cached."""
