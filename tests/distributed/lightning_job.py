"""A training by Lightning in a process of its own, started by test_lightning_trainer.py:
``lightning_job.py FOLDER`` kills itself when its second save has begun to write."""

import os
import signal
import sys
from pathlib import Path

from lightning_training import HoldfastCheckpointIO, fit, keeping, new_net, new_trainer

from holdfast.distributed import SaveOptions


def main():
    folder = Path(sys.argv[1])

    def in_the_second(progress):
        first = folder / "kept" / "epoch=0.ckpt" / "metadata.json"
        if progress.phase == "write" and first.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    plugin = HoldfastCheckpointIO(options=SaveOptions(progress=in_the_second))
    saving = keeping(folder, save_top_k=1)
    fit(new_trainer(folder, plugin=plugin, callbacks=saving), new_net())


if __name__ == "__main__":
    main()
