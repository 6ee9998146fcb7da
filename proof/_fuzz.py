"""Gives one parser bytes without end, in a process of its own, and tells of the first that it does
not take as it should: ``python proof/_fuzz.py NAME SEED RUNS FOLDER``.

With atheris it is led by what code each input reaches, and finds its own way; without it inputs are
only changed at random. Either way the same seed gives the same inputs.
"""

import contextlib
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

HAS_ATHERIS: Final = importlib.util.find_spec("atheris") is not None
MOST_BYTES: Final = 1536 * 1024 * 1024
INPUT_BYTES: Final = 16 * 1024
SLOW_S: Final = 20
_POOL: Final = 400


class TooSlow(Exception):  # noqa: N818
    """One input took longer than any may."""


def tried(parse: Callable[[bytes], object], data: bytes) -> str | None:
    """What is wrong with how ``parse`` took these bytes; ``None`` if nothing is."""
    from holdfast.errors import CheckpointError

    try:
        parse(data)
    except CheckpointError:
        return None
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is what is looked for
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        return f"{type(error).__name__}: {str(error)[:300]} at {where}"
    return None


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """In little memory, and with an end to every input."""

    def late(*_: object) -> None:
        raise TooSlow(f"it took more than {SLOW_S} s")

    before = signal.signal(signal.SIGALRM, late)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def changed_at_random(parser: Any, seed: int, runs: int) -> tuple[int, bytes | None, str | None]:
    """How many inputs were given, and the first that was not taken as it should, and why."""
    from _fuzz_inputs import mutated

    rng = random.Random(seed)
    pool = [data for data in parser.seeds() if len(data) <= INPUT_BYTES]
    fixed = len(pool)
    with limited():
        for done in range(runs):
            data = pool[done] if done < fixed else _next(pool, fixed, rng, parser, mutated)
            signal.alarm(SLOW_S)
            why = tried(parser.parse, data)
            if why is not None:
                return done + 1, data, why
    return runs, None, None


def _next(
    pool: list[bytes], fixed: int, rng: random.Random, parser: Any, mutated: Callable[..., bytes]
) -> bytes:
    data: bytes = mutated(rng.choice(pool), pool, rng, is_json=parser.is_json)[:INPUT_BYTES]
    if rng.random() < 0.02:  # so that changes pile up
        if len(pool) < fixed + _POOL:
            pool.append(data)
        else:
            pool[rng.randrange(fixed, len(pool))] = data
    return data


def led_by_coverage(parser: Any, seed: int, runs: int, folder: Path) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    from _fuzz_inputs import mutated

    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    seeds = [data for data in parser.seeds() if len(data) <= INPUT_BYTES]
    for number, data in enumerate(seeds):
        (corpus / f"{number:04}").write_bytes(data)
    count = 0
    started = time.monotonic()

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        why = tried(parser.parse, data)
        if why is not None:
            _tell(folder, count, data, why, started)
            raise AssertionError(why)
        if count == runs:
            _tell(folder, count, None, None, started)

    def mutate(data: bytes, most: int, mutation_seed: int) -> bytes:
        rng = random.Random(mutation_seed)
        if parser.is_json and rng.random() < 0.5:
            return mutated(data, seeds, rng, is_json=True)[:most]
        return bytes(atheris.Mutate(data, len(data)))[:most]

    options = [
        f"-seed={seed % 2**31 + 1}",
        f"-runs={runs}",
        f"-max_len={INPUT_BYTES}",
        f"-timeout={SLOW_S}",
        "-rss_limit_mb=3072",
        "-len_control=20",
        "-verbosity=0",
        f"-artifact_prefix={folder}/",
        str(corpus),
    ]
    more = {"custom_mutator": mutate} if parser.is_json else {}
    atheris.Setup([sys.argv[0], *options], one, **more)
    _at_exit(folder, lambda: count, started)
    atheris.Fuzz()


def _at_exit(folder: Path, count: Callable[[], int], started: float) -> None:
    import atexit

    def tell() -> None:
        if not (folder / "told.json").exists():
            _tell(folder, count(), None, None, started)

    atexit.register(tell)


def _tell(folder: Path, count: int, data: bytes | None, why: str | None, started: float) -> None:
    if data is not None:
        (folder / "input").write_bytes(data)
    told = {"executions": count, "why": why, "seconds": time.monotonic() - started}
    (folder / "told.json").write_text(json.dumps(told))


def main(name: str, seed: int, runs: int, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if HAS_ATHERIS:
        import atheris

        with atheris.instrument_imports(include=["holdfast"]):
            from _parsers import PARSERS, forget_folder
    else:
        from _parsers import PARSERS, forget_folder
    import atexit

    atexit.register(forget_folder)
    parser = PARSERS[name]
    if HAS_ATHERIS:
        led_by_coverage(parser, seed, runs, folder)
    started = time.monotonic()
    count, data, why = changed_at_random(parser, seed, runs)
    _tell(folder, count, data, why, started)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
