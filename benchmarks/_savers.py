"""Ways to save a training that goes on: holdfast, DCP, and a process beside it. Knows no time.

All have the same methods: ``start`` on the training's thread, ``before_step`` there when the state
is about to change, ``finish`` when it is to be durable, ``clean`` to remove what was written, and
``close`` in the end.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._async_process_executor as executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from _training import Training
from holdfast import CheckpointOptions, DistributedCheckpoint, SaveHandle, SaveOptions, SaveRecord
from holdfast.catalog import Catalog

WRITER = Path(__file__).parent / "_writer.py"
PREFIX = "a"

DCP = ("DCP", "DCP, memory kept", "DCP, staged by a thread", "DCP, by a process")
"""With its defaults; with a stager that is kept, and so is its memory; with one that copies in a
thread, for which the step is waited with; and with one in shared memory, written by a process."""

BESIDE = {"a process that writes": "raw", "a process with holdfast.save": "holdfast"}


class Saver(Protocol):
    def start(self) -> None: ...
    def before_step(self) -> None: ...
    def finish(self) -> None: ...
    def clean(self) -> None: ...
    def close(self) -> None: ...


class Holdfast:
    """``save_async``. ``records`` are of the saves that have finished."""

    def __init__(
        self, folder: Path, training: Training, *, staging_bytes: int | None = None
    ) -> None:
        options = CheckpointOptions(storage=folder, staging_bytes=staging_bytes)
        self._checkpoint = DistributedCheckpoint.create(options=options)
        self._training = training
        self._handle: SaveHandle | None = None
        self.records: list[SaveRecord] = []

    def start(self) -> None:
        options = SaveOptions(checkpoint_prefix=PREFIX, include_rng_state=False)
        self._handle = self._checkpoint.save_async(
            self._training.model, self._training.optimizer, options
        )

    def before_step(self) -> None:
        pass

    def finish(self) -> None:
        if self._handle is not None:
            self._handle.result()
            if self._handle.record is not None:
                self.records.append(self._handle.record)

    def clean(self) -> None:
        if dist.get_rank() == 0:
            self._checkpoint.catalog.rollback(PREFIX)
        dist.barrier()

    def close(self) -> None:
        self._checkpoint.close()


class Dcp:
    """``async_save``, handed its tensors ready-made, in a process group of its own."""

    def __init__(self, folder: Path, training: Training, name: str) -> None:
        self._folder = folder
        self._training = training
        self._options: dict[str, Any] = {"process_group": dist.new_group(backend="gloo")}
        is_process = name == "DCP, by a process"
        if name != "DCP":
            self._options["async_stager"] = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=is_process,
                    use_async_staging=name == "DCP, staged by a thread",
                    use_non_blocking_copy=False,
                )
            )
        if is_process:
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        self._answer: Any = None

    def start(self) -> None:
        self._answer = dcp.async_save(
            self._training.tensors(), checkpoint_id=self._folder / PREFIX, **self._options
        )

    def before_step(self) -> None:
        if isinstance(self._answer, AsyncSaveResponse):
            self._answer.staging_completion.result()

    def finish(self) -> None:
        answer = self._answer
        if isinstance(answer, AsyncSaveResponse):
            answer.upload_completion.result()
        elif answer is not None:
            answer.result()

    def clean(self) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / PREFIX, ignore_errors=True)
        dist.barrier()

    def close(self) -> None:
        executor._CHECKPOINT_PROCESS = None  # noqa: SLF001 -- nothing else ends it


class Beside:
    """A process that writes as many bytes of its own. It is there before, and waits in a pipe."""

    def __init__(self, folder: Path, training: Training, name: str) -> None:
        self._path = folder / PREFIX
        folder.mkdir(exist_ok=True)
        kind = BESIDE[name]
        self._is_checkpoint = kind == "holdfast"
        self._process = subprocess.Popen(
            [sys.executable, WRITER, kind, self._path, str(training.size_bytes())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def before_step(self) -> None:
        pass

    def finish(self) -> None:
        self._answer()

    def clean(self) -> None:
        if self._is_checkpoint:
            Catalog(self._path.parent).rollback(PREFIX)
        else:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"done\n":
            raise ChildProcessError(f"the writer ended with {self._process.wait()}")


class Nothing:
    def start(self) -> None: ...
    def before_step(self) -> None: ...
    def finish(self) -> None: ...
    def clean(self) -> None: ...
    def close(self) -> None: ...


def saver_of(name: str, folder: Path, training: Training) -> Saver:
    """One in a folder of its own; every rank makes the same."""
    own = folder / name.replace(" ", "-").replace(",", "")
    if name == "nothing":
        return Nothing()
    if name == "holdfast":
        return Holdfast(own, training)
    if name == "holdfast, a quarter of the memory":
        return Holdfast(own, training, staging_bytes=training.size_bytes() // 4)
    if name in BESIDE:
        return Beside(own, training, name)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # for DCP's process, which would ask the DNS
    return Dcp(own, training, name)
