"""What is done when a save has ended on this rank: tidying up after a commit, and after an error
removing what nobody will commit. Knows how far the save had come, not how it got there."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.catalog import Attempt
from holdfast.catalog._attempt import written_in
from holdfast.catalog._delete import delete_replaced
from holdfast.catalog._model_index import settle_index
from holdfast.distributed._save_record import is_cancellation
from holdfast.distributed._tools import Tools
from holdfast.distributed._watch import finish_within
from holdfast.errors import CheckpointError, SaveError

_log = logging.getLogger("holdfast.distributed")

COMMITTER: Final = 0
"""The rank that begins and commits."""

_BEFORE_COMMIT: Final = frozenset({"capture", "begin", "compare", "write"})
"""Phases in which a rank has not given its word. Not "agree": every operation ends with one."""

_TIDY_S: Final = 60.0
"""How long tidying up after a commit may take before ``save`` returns without it."""

_CLEAN_S: Final = 3.0
"""How long what a failed save wrote is being removed before the error is raised."""


@dataclass(slots=True, kw_only=True)
class Standing:
    """How far a save has come on this rank.

    ``name`` is the attempt's, known to all ranks once it has begun, and ``attempt`` the committer's
    own; ``told`` if the committer may have all that it needs to commit; ``committing`` if a commit
    was left running; ``sent`` if the way to other ranks was used.
    """

    prefix: str = ""
    name: str = ""
    attempt: Attempt | None = None
    told: bool = False
    committing: bool = False
    committed: bool = False
    sent: bool = False


def tidy_up(tools: Tools, standing: Standing, *, has_index: bool) -> None:
    """After the commit, and not part of it: nothing here can make the save fail."""
    attempt, prefix = standing.attempt, standing.prefix
    if attempt is None:
        return

    def tidy() -> None:
        if has_index:
            settle_index(tools.storage, prefix)
        if attempt.replaces is not None:
            delete_replaced(tools.storage, attempt.replaces)

    try:
        if not finish_within(_TIDY_S, tidy):
            _log.warning("%s is saved; tidying up goes on in the background", prefix)
    except Exception as error:  # noqa: BLE001 -- the checkpoint is there
        _log.warning("%s is saved, but not all is tidy: %s", prefix, error)


def give_up(tools: Tools, standing: Standing, error: BaseException) -> None:
    """After an error: remove what nobody will commit, and have the error say what is known."""
    tools.locate(error)
    if standing.sent:
        tools.bulk.discard()
    if standing.committed:
        _say(error, f"{standing.prefix} is committed and whole all the same.")
    elif standing.attempt is not None and not standing.committing:
        _clean_up(error, standing.attempt.abort)
    elif standing.name and not standing.told:
        # This rank's word is missing, so nobody commits, and the files of all are nobody's.
        _clean_up(error, lambda: _remove_written(tools, standing))
    elif standing.name and not (_is_before_commit(error) or _is_refused(error)):
        _say(
            error,
            f"Whether {standing.prefix} is committed is unknown: list the checkpoints to see. "
            "What was saved before is intact; gc removes what is left if it is not.",
        )


def _clean_up(error: BaseException, work: Callable[[], None]) -> None:
    """Remove what was written, if the storage lets it be removed in time."""
    problem = f"it took longer than {_CLEAN_S:g} s"
    try:
        if finish_within(_CLEAN_S, work):
            return
    except CheckpointError as found:
        problem = str(found)
    error.add_note(
        f"What the save had written could not be removed: {problem}. gc removes what is left."
    )


def _remove_written(tools: Tools, standing: Standing) -> None:
    for key in written_in(tools.storage, standing.prefix, standing.name):
        tools.storage.delete(key)


def _is_before_commit(error: BaseException) -> bool:
    """Whether the rank where an error began says that it had not given its word. Good enough to
    say nothing of the outcome, and not to delete anything."""
    if is_cancellation(error):
        return True
    return isinstance(error, CheckpointError) and error.phase in _BEFORE_COMMIT


def _is_refused(error: BaseException) -> bool:
    """Whether rank 0 said that it refused to commit."""
    return isinstance(error, SaveError) and error.rank == COMMITTER


def _say(error: BaseException, sentence: str) -> None:
    if isinstance(error, CheckpointError):
        error.args = (f"{error.message}. {sentence}", *error.args[1:])
    else:
        error.add_note(sentence)
