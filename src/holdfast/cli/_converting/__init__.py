"""What ``holdfast convert`` and ``holdfast reshard`` do: a module for each format read or written.

A source becomes ``Contents``, a tree with tensors that are not read yet; a target takes them one
after the other. All that needs torch is in ``with_torch``, which is loaded only when a source or a
target is torch's.
"""
