"""Corruption is never loaded: stored bytes go wrong in every way, and each must be noticed, and be
located to its file and tensor. Knows how to judge a load; the wounds themselves are the tests'.

holdfast's checkpoints are harmed in memory, of several files, plain and compressed, and on disk
through ``holdfast.load``. Peers are harmed on disk. What they load without an error and is not what
was saved counts as a violation; where in the file the harm is, no peer could say.
"""

import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rotting import Files, Rotten, Wound, wound

from _campaign import HOLDFAST, Campaign, Outcome
from _subjects import SUBJECTS, Subject, Wrong, subject, unavailable
from holdfast.errors import CheckpointError, ValidationError
from holdfast.format import CompressionLevel

IN_MEMORY = 1500
ON_DISK = 100
ELEMENTS = 4000
SCALES = (1, 7, 50)  # from less than a block to several in each file
MOST_TOLD = 5
OLD, NEW = 1, 2
NO_CONSEQUENCE = "of no consequence to any value, and not noticed"


@dataclass(slots=True)
class Tally:
    """What came of the wounds so far."""

    cases: int = 0
    violated: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def count(self, harm: Wound, how: str, violation: str | None = None) -> None:
        """``how`` it ended is counted. A violation is a sentence."""
        self.cases += 1
        self.facts[f"{harm.kind}"] += 1
        self.facts[how] += 1
        if violation is not None:
            self.violated += 1
            self.facts[f"{harm.kind} not noticed"] += 1
            if len(self.told) < MOST_TOLD:
                self.told.append(f"{harm.words}: {violation}")

    def outcome(self) -> Outcome:
        return Outcome(
            cases=self.cases,
            violated=self.violated,
            violations=tuple(self.told),
            facts=self.facts,
        )


def run(name: str, seed: int) -> Outcome:
    rng = random.Random(seed)
    tally = Tally()
    if name == HOLDFAST:
        harm_in_memory(tally, rng, IN_MEMORY)
    harm_on_disk(tally, subject(name, ELEMENTS), rng, ON_DISK)
    return tally.outcome()


def harm_in_memory(
    tally: Tally, rng: random.Random, cases: int, make: Callable[..., Rotten] = Rotten
) -> None:
    """``make`` is who answers for the checkpoint."""
    level = rng.choice([CompressionLevel.NONE, CompressionLevel.BALANCED])
    rotten = make(rng.randrange(2**32), level, rng.choice(SCALES))
    for _ in range(cases):
        harm = wound(rotten.files, rng, rotten.older)
        said = rotten.harm(harm)
        if said == "nothing":
            tally.count(harm, NO_CONSEQUENCE)
        elif said is None:
            tally.count(harm, "noticed and located")
        else:
            tally.count(harm, "not noticed or not located", said)
    if (said := rotten.misread()) is not None:
        raise AssertionError(f"the checkpoint was not healed: {said}")


def harm_on_disk(tally: Tally, saver: Subject, rng: random.Random, cases: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        saver.save(folder, OLD)
        older = _read(saver, folder)
        saver.save(folder, NEW)
        files = _read(saver, folder)
        # Of a saver with one file, an older one is an older checkpoint and no damage.
        before = older if len(files) > 1 else None
        for _ in range(cases):
            harm = wound(files, rng, before)
            for key, data in harm.files.items():
                (folder / key).write_bytes(data)
            tally.count(harm, *_loaded(saver, folder, _places(harm, files, older)))
            for key in harm.files:
                (folder / key).write_bytes(files[key])
        if saver.load(folder) != NEW:
            raise AssertionError(f"what {saver.name} has saved was not healed")


def _read(saver: Subject, folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in saver.files(folder)}


def _places(harm: Wound, files: Files, older: Files) -> set[str]:
    """The names of files of which an error may say that the harm is there."""
    changed = {key for key, data in harm.files.items() if data != files[key]}
    if harm.kind == "stale files":
        # A record of an older save is whole, and so nobody can say that it is the wrong one: what
        # can be seen is that files are missing which it names.
        changed |= older.keys() - files.keys()
    return {Path(key).name for key in changed}


def _loaded(saver: Subject, folder: Path, places: set[str]) -> tuple[str, str | None]:
    """How a load of files ended that are harmed at ``places``, and what is wrong with that."""
    try:
        value = saver.load(folder)
    except KeyboardInterrupt:
        raise
    except Wrong as wrong:
        return "silently wrong", f"loaded without an error, and it {wrong}"
    except BaseException as error:  # noqa: BLE001 -- torch's CheckpointException is no Exception
        return _refused(saver, error, places)
    if value != NEW:
        return "silently wrong", f"loaded value {value} without an error, not {NEW}"
    if saver.name == HOLDFAST:
        return "not noticed or not located", "loaded without an error, though no value was wrong"
    return NO_CONSEQUENCE, None


def _refused(saver: Subject, error: BaseException, places: set[str]) -> tuple[str, str | None]:
    if saver.name != HOLDFAST:
        return "refused", None
    if not isinstance(error, CheckpointError) or error.path is None:
        return "not noticed or not located", f"raised {error!r}, which names no file"
    if not (named := _named(error)) or not named <= places:
        return "not noticed or not located", f"named {_shown(named)}, not {_shown(places)}: {error}"
    return "noticed and located", None


def _named(error: CheckpointError) -> set[str]:
    """The names of the files that it says are harmed. A validation may have found several: its path
    is the checkpoint's, and each of its lines begins with a file."""
    if isinstance(error, ValidationError):
        return {Path(key).name for key in re.findall(r"(?m)^ *error: (\S+): ", error.message)}
    return {Path(error.path or "").name}


def _shown(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "no file"


CAMPAIGN = Campaign(
    name="bit_rot",
    promise="Corruption is never loaded: flipped bits, zeroed and exchanged blocks, wrong lengths, "
    "exchanged files and those of an older save are noticed, and located to file and tensor; of "
    "compressed bytes, what changes a value.",
    counted="wounds",
    cases=100_000,
    run=run,
    subjects=SUBJECTS,
    peer_cases=200,
    batch_timeout_s=300,
    unavailable=unavailable,
)
