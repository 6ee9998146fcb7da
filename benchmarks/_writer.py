"""A process that writes a number of bytes, durably, whenever it is told to by a line on its input.

``_writer.py raw|holdfast path size_bytes``: direct I/O, or ``holdfast.save`` of as large a state.
"""

import sys
from pathlib import Path

import torch

import holdfast
from _disk import raw_write

LEAF_BYTES = 64 * 2**20


def main() -> None:
    kind, path, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    sizes = [LEAF_BYTES] * (size // LEAF_BYTES) + [size % LEAF_BYTES] if kind == "holdfast" else []
    state = {f"leaf{n}": torch.rand(each // 4) for n, each in enumerate(sizes)}
    print("done", flush=True)
    for _ in sys.stdin:
        if kind == "raw":
            raw_write(path, size, 1)
        else:
            holdfast.save(state, path)
        print("done", flush=True)


if __name__ == "__main__":
    main()
