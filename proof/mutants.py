"""Whether the tests would notice a mistake in the core: small wrong changes, one at a time.

``python proof/mutants.py`` (``make mutants``) draws 500 changes by a seed, runs for each the tests
that run its line, and lists those that no test noticed. As a campaign it draws 25 a batch. What it
found is kept in ``build/proof/mutants.jsonl`` and not found out again until the file, or the tests,
change.
"""

import argparse
import functools
import hashlib
import itertools
import json
import threading
import tomllib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from _campaign import Campaign, Outcome
from _covering import CORE, REPO, TESTS, Covering, TimedTest, cover
from _mutating import Mutant, mutants
from _trying import Lane, Tried, lane

LEAST_PERCENT: Final = 90.0
_JUDGED_FROM: Final = 100
"""Fewer mutants say too little about the share of those that are killed."""

_BATCH: Final = 25
_LANES: Final = 2
_FIRST_S: Final = 2.0
_NEXT_S: Final = 4.0
_MORE_S: Final = 20.0
"""How long the tests of one mutant may take: a few, and if these notice nothing, more."""

_SOON, _LATER = slice(2), slice(2, None)

_LEDGER: Final = REPO / "build" / "proof" / "mutants.jsonl"
_EQUIVALENT: Final = Path(__file__).with_name("equivalent_mutants.toml")

Verdict = Literal["killed", "survived", "equivalent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A mutant of one of the library's files."""

    path: Path
    mutant: Mutant
    key: str

    def __str__(self) -> str:
        change = self.mutant
        where = f" in {change.where}" if change.where else ""
        before, after = (" ".join(text.split()) for text in (change.was, change.becomes))
        name = self.path.relative_to(REPO)
        return f"{name}:{change.line}{where}: `{before}` became `{after}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict. ``tests`` is a digest of what it rests on: the file of the test that killed it, or
    all tests."""

    key: str
    verdict: Verdict
    by: str = ""
    tests: str = ""


def population() -> list[Placed]:
    """Every mutant of the core, always in the same order."""
    found = []
    for path in itertools.chain.from_iterable(CORE.values()):
        source = path.read_bytes()
        for mutant in mutants(source):
            named = f"{path.relative_to(REPO)}\0{mutant.start}\0{mutant.end}\0{mutant.becomes}\0"
            key = hashlib.sha256(named.encode() + source).hexdigest()[:24]
            found.append(Placed(path=path, mutant=mutant, key=key))
    return found


def draw(everything: Sequence[Placed], seed: int, count: int) -> list[Placed]:
    """So many of them, by chance. What else there is makes no difference to whether one of them is
    drawn sooner than another, so that a change of the source leaves the rest as they were."""

    def chance(placed: Placed) -> bytes:
        return hashlib.sha256(repr((seed, *_name(placed))).encode()).digest()

    return sorted(everything, key=chance)[:count]


def equivalents() -> dict[tuple[str, str, str, str, int], str]:
    """Why each mutant that is known to change nothing does not."""
    listed = tomllib.loads(_EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {
        (each["file"], each["where"], each["was"], each["becomes"], each.get("nth", 0)): each["why"]
        for each in listed
    }


def _name(placed: Placed) -> tuple[str, str, str, str, int]:
    change = placed.mutant
    file = placed.path.relative_to(REPO).as_posix()
    return file, change.where, change.was, change.becomes, change.nth


def choose(covering: Covering, placed: Placed) -> list[list[TimedTest]]:
    """The tests to run, in turns, each only if those before noticed nothing: those of the files
    that are about little else, which are soon loaded; others; and then more of all. Of every test
    function the quickest case comes before the second of any."""
    lines = covering.lines[placed.path]
    change = placed.mutant
    first, last = change.statement
    found = {test.nodeid: test for test in lines.get(change.line, ())}
    if not found:
        found = {test.nodeid: test for n in range(first, last + 1) for test in lines.get(n, ())}
    if change.at_import or not found:  # not found: called only while the module is loaded
        found = {test.nodeid: test for tests in lines.values() for test in tests}
    ordered = _by_turns(found.values())
    close = {*_closest(covering, [test for test in ordered if not test.with_torch])}
    closest_first = sorted(ordered, key=lambda test: test.file not in close)
    turns: list[list[TimedTest]] = []
    taken: set[str] = set()
    for seconds, with_torch, files in (
        (_FIRST_S, False, close),
        (_NEXT_S, False, None),
        (_MORE_S, True, None),
    ):
        turn = _within(
            seconds,
            (
                test
                for test in (closest_first if with_torch else ordered)
                if test.nodeid not in taken
                and (with_torch or not test.with_torch)
                and (files is None or test.file in files)
            ),
        )
        turns.append([*turn])
        taken |= {test.nodeid for test in turns[-1]}
    return turns


def _closest(covering: Covering, tests: Iterable[TimedTest], most: int = 2) -> list[str]:
    """The files of which the largest part of the tests are among these."""
    sizes = Counter(test.file for test in covering.tests.values())
    here = Counter(test.file for test in tests)
    return sorted(here, key=lambda file: (-here[file] / sizes[file], sizes[file]))[:most]


def _by_turns(tests: Iterable[TimedTest]) -> list[TimedTest]:
    functions: dict[str, list[TimedTest]] = {}
    for test in sorted(tests, key=lambda test: test.seconds):
        functions.setdefault(test.nodeid.partition("[")[0], []).append(test)
    rounds = itertools.zip_longest(*functions.values())
    return [test for turn in rounds for test in turn if test is not None]


def _within(seconds: float, tests: Iterable[TimedTest]) -> Iterator[TimedTest]:
    spent = 0.0
    for test in tests:
        spent += test.seconds + 0.005
        if spent <= seconds:
            yield test


def _killer(covering: Covering, lane: Lane, placed: Placed, turns: slice) -> str | None:
    """The test that notices it, of those whose turn it is."""
    changed = placed.mutant.applied(placed.path.read_bytes())
    compile(changed, placed.path, "exec")  # one that is no Python would prove nothing
    for tests in choose(covering, placed)[turns]:
        names = [test.nodeid for test in tests]
        if not names:
            continue
        seconds = sum(test.seconds for test in tests)
        tried: Tried = lane.try_tests(placed.path, changed, names, seconds)
        if tried.failed:
            return tried.by
    return None


def _state_of(nodeid: str) -> str:
    file = REPO / nodeid.partition("::")[0]
    return _digest([file]) if nodeid and file.is_file() else ""


def _state_of_all() -> str:
    return _digest(REPO / test for test in TESTS)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _known() -> dict[str, Judged]:
    """What is known from before and still holds, by the mutants' keys."""
    if not _LEDGER.exists():
        return {}
    found: dict[str, Judged] = {}
    everything = _state_of_all()
    state_of = functools.cache(_state_of)
    for line in _LEDGER.read_text(encoding="utf-8").splitlines():
        judged = Judged(**json.loads(line))
        rests_on = everything if judged.verdict == "survived" else state_of(judged.by)
        if judged.tests == rests_on:
            found[judged.key] = judged
    return found


def judge(drawn: Sequence[Placed], *, tell: bool = False) -> dict[str, Judged]:
    """The verdicts on these, by their keys: looked up, or found out and written down."""
    known, same = _known(), equivalents()
    found = {
        placed.key: Judged(key=placed.key, verdict="equivalent", by=same[_name(placed)])
        for placed in drawn
        if _name(placed) in same
    }
    found |= {p.key: known[p.key] for p in drawn if p.key in known and p.key not in found}
    due = [placed for placed in drawn if placed.key not in found]
    if not due:
        return found
    all_tests = _state_of_all()
    covering = cover()
    _LEDGER.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()
    # The tests that take long come when all others had their turn: few mutants are left then.
    queue = deque((placed, _SOON) for placed in due)

    def work() -> None:
        with lane() as mine:
            _check_unchanged(covering, mine, due[0])
            while True:
                with lock:
                    if not queue:
                        return
                    placed, turns = queue.popleft()
                by = _killer(covering, mine, placed, turns)
                if by is None and turns == _SOON:
                    queue.append((placed, _LATER))
                    continue
                verdict: Verdict = "survived" if by is None else "killed"
                tests = all_tests if by is None else _state_of(by)
                with lock:
                    judged = Judged(key=placed.key, verdict=verdict, by=by or "", tests=tests)
                    found[placed.key] = judged
                    with _LEDGER.open("a", encoding="utf-8") as ledger:
                        ledger.write(json.dumps(asdict(judged)) + "\n")
                    if tell:
                        print(f"{len(found)}/{len(drawn)} {verdict:8} {placed}", flush=True)

    with ThreadPoolExecutor(_LANES) as pool:
        for done in [pool.submit(work) for _ in range(min(_LANES, len(due)))]:
            done.result()
    return found


def _check_unchanged(covering: Covering, lane: Lane, placed: Placed) -> None:
    """The tests pass on a copy without a change: what fails later fails because of one."""
    names = [test.nodeid for test in choose(covering, placed)[0]]
    tried = lane.try_tests(placed.path, placed.path.read_bytes(), names, 60.0)
    if names and tried.failed:
        raise RuntimeError(f"without any change {tried.by} fails")


def share_killed(verdicts: Iterable[Judged]) -> float | None:
    """Killed among those that change something, in percent, or ``None`` if they are too few."""
    counted = Counter(judged.verdict for judged in verdicts)
    all_of_them = counted["killed"] + counted["survived"]
    if all_of_them < _JUDGED_FROM:
        return None
    return 100 * counted["killed"] / all_of_them


def run(_subject: str, seed: int) -> Outcome:
    """One batch. A violation if of all that are known of this source too few are killed."""
    everything = population()
    drawn = draw(everything, seed, _BATCH)
    found = judge(drawn)
    facts = Counter(f"mutants {found[placed.key].verdict}" for placed in drawn)
    same = equivalents()
    present = {placed.key for placed in everything if _name(placed) not in same}
    share = share_killed(judged for judged in _known().values() if judged.key in present)
    if share is None or share >= LEAST_PERCENT:
        return Outcome(cases=len(drawn), facts=facts)
    problem = f"only {share:.1f} % of mutants are noticed by a test, see make mutants"
    return Outcome(cases=len(drawn), violated=1, violations=(problem,), facts=facts)


def _unavailable(_subject: str) -> str | None:
    try:
        import coverage  # noqa: F401
    except ImportError:
        return "coverage.py is not installed: pip install -e '.[proof]'"
    return None


CAMPAIGN = Campaign(
    name="mutants",
    promise="A mistake in the core is noticed by a test",
    counted="small wrong changes to the format, resharding, commits and storages",
    cases=500,
    run=run,
    batch_timeout_s=3600,
    unavailable=_unavailable,
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=500)
    chosen = options.parse_args()
    everything = population()
    drawn = draw(everything, chosen.seed, chosen.count)
    found = judge(drawn, tell=True)
    print()
    for placed in drawn:
        if found[placed.key].verdict == "survived":
            print(f"survived: {placed}")
    for room, (counted, percent) in _by_room(drawn, found).items():
        words = ", ".join(f"{counted[verdict]} {verdict}" for verdict in ("killed", "survived"))
        print(f"{room:8} {percent:6.1f} % killed: {words}, {counted['equivalent']} equivalent")
    share = share_killed(found.values())
    print(f"{len(drawn)} of {len(everything)} mutants, seed {chosen.seed}")
    raise SystemExit(share is not None and share < LEAST_PERCENT)


def _by_room(
    drawn: Sequence[Placed], found: Mapping[str, Judged]
) -> dict[str, tuple[Counter[str], float]]:
    rooms: dict[str, tuple[Counter[str], float]] = {}
    for room, paths in {**CORE, "all": [*itertools.chain.from_iterable(CORE.values())]}.items():
        counted = Counter[str](found[p.key].verdict for p in drawn if p.path in paths)
        judged = counted["killed"] + counted["survived"]
        rooms[room] = counted, 100 * counted["killed"] / max(judged, 1)
    return rooms


if __name__ == "__main__":
    main()
