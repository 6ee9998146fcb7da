"""What ``holdfast demo`` shows: a training that is killed, damaged and resumed, as a page too.

``training`` runs in processes of its own, by torchrun; nothing else here needs torch.
"""
