"""Whether a checkpoint is whole, said to its user. What that means is ``_structure``'s."""

from holdfast.distributed import ValidationResult
from holdfast.errors import SaveError
from holdfast.precision._checkpoint import MixedPrecisionCheckpoint, field_problems
from holdfast.precision._structure import value_problems, whole_problems


def validate_checkpoint(checkpoint: object) -> ValidationResult:
    """All that keeps a checkpoint from being restored anywhere; nothing if it is whole. True in an
    ``if`` when it is.

    Reads the tensors, too: masters must be finite, and training weights their masters, rounded.
    Training weights may be absent. Never raises for what it is given.
    """
    if not isinstance(checkpoint, MixedPrecisionCheckpoint):
        return ValidationResult(errors=(f"this is no checkpoint but {checkpoint!r:.200}",))
    try:
        tree = checkpoint.tree()
    except SaveError as error:  # it was never copied, and cannot be any more
        return ValidationResult(errors=(str(error),))
    problems = [*field_problems(checkpoint), *whole_problems(tree)]
    return ValidationResult(errors=tuple(problems or value_problems(tree)))
