"""Functions that recompute, by layer: the engine, its order and its statistics."""
