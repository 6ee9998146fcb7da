"""What a plan chooses from: a chain of stages, and the ways to run each. Knows bytes and seconds,
not models.

A step runs the stages forward in order, then what follows the last of them (the head and the
loss), then the stages backward. Its peak is counted over what is resident at its start. What a
stage has on its account stays there from the end of its forward to its backward, so with ``K_j``
on the account of stage ``j`` a budget ``B`` holds if, for every stage ``i``,

    base + sum(K_j, j < i) + forward_bytes_i  <= B
    base + sum(K_j)        + head_bytes       <= B
    base + sum(K_j, j < i) + backward_bytes_i <= B      (of the option chosen)
"""

from dataclasses import dataclass

from holdfast import _checks

# A pebibyte: sums of thousands of such numbers still fit the 64 bits of an array.
MOST_BYTES = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a stage in the first forward.

    ``kept_bytes`` are on the stage's account from the end of its forward to the start of its
    backward: its saved tensors, and its input if that is kept. ``backward_bytes`` is the most that
    lives during its backward over what the stages before it keep, its own kept bytes included.
    ``extra_s`` is what it costs a step over keeping everything. ``dropped`` are the tensors that
    recipes make again, by the numbers the profile gave them.
    """

    label: str
    kept_bytes: int
    extra_s: float
    backward_bytes: int
    dropped: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _bytes(self, "kept_bytes", "backward_bytes")
        _checks.between("extra_s", self.extra_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the model that is run as one, and what is known of it.

    The first of ``options`` keeps everything. ``forward_bytes`` is the most that lives during its
    forward over what the stages before it keep, with its input and all that it has saved by then;
    ``replayed_bytes`` the most that lives when it is run again from its kept input and its
    backward follows at once, that input included. It is ``replayable`` if keeping only its input
    is possible, and ``linked`` if its input is exactly the output of the stage before and nothing
    else happens between them, so that running that stage again makes it.
    """

    name: str
    options: tuple[Option, ...]
    input_bytes: int
    output_bytes: int
    forward_s: float
    forward_bytes: int
    replayed_bytes: int
    replayable: bool
    linked: bool

    def __post_init__(self) -> None:
        if not self.options:
            raise ValueError(f"stage {self.name!r} must have at least one option")
        if self.keep.extra_s:
            raise ValueError(
                f"the first option of stage {self.name!r} keeps everything and so costs nothing "
                f"over that, not {self.keep.extra_s!r} s"
            )
        _bytes(self, "input_bytes", "output_bytes", "forward_bytes", "replayed_bytes")
        _checks.between("forward_s", self.forward_s, 0.0)

    @property
    def keep(self) -> Option:
        """The option that keeps everything."""
        return self.options[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The stages of a step in the order of their forward.

    ``base_bytes`` is what the step holds throughout besides them; ``head_bytes`` the most that
    lives between the forward and the backward of the last stage, over base and what they keep.
    """

    stages: tuple[Stage, ...]
    base_bytes: int
    head_bytes: int

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a chain must have at least one stage")
        _bytes(self, "base_bytes", "head_bytes")

    def reach(self, first: int) -> int:
        """How many stages from ``first`` on can be run again together from the input of the first:
        all of them replayable, and each after the first linked. 0 if not even that one can."""
        length = 0
        for stage in self.stages[first:]:
            if not stage.replayable or (length and not stage.linked):
                break
            length += 1
        return length

    def run_peaks(self, first: int, length: int) -> list[int]:
        """The most that lives while ``first`` and the ``k`` stages after it are run and only the
        input of ``first`` is kept, for each ``k`` below ``length``, over what earlier stages keep.

        A stage that keeps nothing is charged its full ``forward_bytes``: less may live, but its
        peak may also come before it has saved anything. No budget is lost by it, since the stage
        is replayed later on top of at least as much, as long as ``replayed_bytes`` is no less.
        """
        peaks = [self.stages[first].forward_bytes]
        kept = self.stages[first].input_bytes
        for stage in self.stages[first + 1 : first + length]:
            peaks.append(max(peaks[-1], kept + stage.forward_bytes))
        return peaks


def _bytes(value: object, *names: str) -> None:
    for name in names:
        given = getattr(value, name)
        _checks.count(name, given, least=0)
        if given > MOST_BYTES:
            raise ValueError(f"{name} must be at most {MOST_BYTES} bytes, not {given}")
