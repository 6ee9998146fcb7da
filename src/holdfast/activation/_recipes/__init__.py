"""Saved tensors dropped after a forward, and made again in backward by the one operation that made
them. Knows autograd's graph; chooses nothing."""
