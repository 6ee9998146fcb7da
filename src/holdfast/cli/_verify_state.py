"""What a verification has seen so far, in a file, so that an interrupted one goes on.

The file says of which store and which saves it is; what is of another save counts for nothing.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from holdfast.catalog import Damage
from holdfast.cli._exits import MisuseError

_FORMAT: Final = "holdfast-verify-1"


class _Seen(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint: the attempt that saved it, into how many parts it was divided, which of
    them were read, and what was found in them."""

    attempt: str
    of: int
    done: list[int] = []
    checked_bytes: int = 0
    damage: list[tuple[str, str | None, str]] = []


class _File(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: str
    store: str
    sample: str
    seed: int
    checkpoints: dict[str, _Seen] = {}


@dataclass(slots=True)
class Progressed:
    """What was seen of one checkpoint."""

    done: set[int] = field(default_factory=set)
    checked_bytes: int = 0
    damage: dict[Damage, None] = field(default_factory=dict)


class VerifyState:
    """The file, or without a path nothing: then all is forgotten when the process ends."""

    def __init__(self, path: Path | None, file: _File) -> None:
        self._path = path
        self._file = file

    @classmethod
    def open(cls, path: Path | None, *, store: str, sample: str, seed: int) -> Self:
        """Read the file, or begin a new one. It must be of this store and this sample: a part of
        something else must not pass for a part of this."""
        new = _File(format=_FORMAT, store=store, sample=sample, seed=seed)
        if path is None or not path.exists():
            return cls(path, new)
        try:
            old = msgspec.json.decode(path.read_bytes(), type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MisuseError(f"{path} is no state of holdfast verify ({error})") from error
        said = (old.format, old.store, old.sample, old.seed)
        if said != (new.format, new.store, new.sample, new.seed):
            raise MisuseError(
                f"{path} is the state of another verification: of {old.store}, --sample "
                f"{old.sample} --seed {old.seed}; give that one, or another file"
            )
        return cls(path, old)

    def seen(self, name: str, attempt: str, of: int) -> Progressed:
        """What was seen of this very save, divided into that many parts."""
        seen = self._file.checkpoints.get(name)
        if seen is None or (seen.attempt, seen.of) != (attempt, of):
            return Progressed()
        damage = [Damage(file=file, tensor=t, problem=what) for file, t, what in seen.damage]
        return Progressed(
            done=set(seen.done), checked_bytes=seen.checked_bytes, damage=dict.fromkeys(damage)
        )

    def keep(self, name: str, attempt: str, of: int, progressed: Progressed) -> None:
        """Remember this, in one step: an interrupt leaves the file as it was or as it is now."""
        self._file.checkpoints[name] = _Seen(
            attempt=attempt,
            of=of,
            done=sorted(progressed.done),
            checked_bytes=progressed.checked_bytes,
            damage=[(each.file, each.tensor, each.problem) for each in progressed.damage],
        )
        if self._path is None:
            return
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        plain: Any = msgspec.to_builtins(self._file)
        beside.write_text(json.dumps(plain, indent=1), encoding="utf-8")
        beside.replace(self._path)

    def end(self) -> None:
        """All was seen: the next verification begins anew."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
