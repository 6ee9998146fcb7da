"""The random generators of this process as plain values and back: Python, NumPy, torch and CUDA.

Knows the generators everybody uses without making one; a generator that a program made itself is
the program's to save. Knows no checkpoint and no other rank.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import numpy as np
import torch

from holdfast.errors import LoadError

RNG: Final = "rng"
"""Where in a tree the state of random number generators is."""

_PYTHON: Final = "python"
_NUMPY: Final = "numpy"
_TORCH: Final = "torch"
_CUDA: Final = "cuda"

_MT19937_WORDS: Final = 624


def capture_rng() -> dict[str, object]:
    """The state of every generator, in values that can be stored; no generator is advanced.

    CUDA devices are there only if this process uses CUDA already: asking would start it.
    """
    version, words, gauss = random.getstate()
    state: dict[str, object] = {
        _PYTHON: {"version": version, "state": np.array(words, np.uint32), "gauss": gauss},
        _NUMPY: np.random.get_state(legacy=False),  # noqa: NPY002 -- the one that is global
        _TORCH: torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state[_CUDA] = torch.cuda.get_rng_state_all()
    return state


@final
class RngFill:
    """An ``Action`` that puts the generators into a captured state.

    Each part is tried on a generator of its own first: ``LoadError`` at once, with nothing
    changed, if one is malformed or NumPy's global generator is of another kind. What cannot be
    restored here, a CUDA device that this process does not have for one, is named in ``left_out``.
    """

    left_out: tuple[str, ...]

    def __init__(self, state: Mapping[str, object]) -> None:
        if not isinstance(state, Mapping):
            raise _malformed("state", f"it is a {type(state).__name__} and not a dict")
        self._former: dict[str, object] | None = None
        self._sets: list[Callable[[], None]] = []
        left_out = [name for name in state if name not in {_PYTHON, _NUMPY, _TORCH, _CUDA}]
        if _PYTHON in state:
            self._sets.append(_python_setter(state[_PYTHON]))
        if _NUMPY in state:
            self._sets.append(_numpy_setter(state[_NUMPY]))
        if _TORCH in state:
            self._sets.append(_torch_setter(state[_TORCH]))
        self._uses_cuda = False
        for index, part in enumerate(_listed(state.get(_CUDA, ()))):
            if torch.cuda.is_available() and index < torch.cuda.device_count():
                self._sets.append(_cuda_setter(part, index))
                self._uses_cuda = True
            else:
                left_out.append(f"{_CUDA}:{index}")
        self.left_out = tuple(left_out)

    def apply(self) -> None:
        if self._uses_cuda:
            torch.cuda.init()  # so that what is captured for undo has the devices
        self._former = capture_rng()
        for put in self._sets:
            put()

    def undo(self) -> None:
        if self._former is not None:
            RngFill(self._former).apply()
            self._former = None


def _python_setter(part: object) -> Callable[[], None]:
    try:
        if not isinstance(part, Mapping):
            raise TypeError(f"it is a {type(part).__name__} and not a dict")  # noqa: TRY301
        words = np.asarray(part["state"])
        state = (part["version"], tuple(map(int, words.tolist())), part["gauss"])
        random.Random().setstate(state)  # noqa: S311
        if not isinstance(part["gauss"], float | None):
            raise TypeError("gauss is no number")  # noqa: TRY301
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise _malformed("Python's random", error) from error
    return lambda: random.setstate(state)


def _numpy_setter(part: object) -> Callable[[], None]:
    here = np.random.get_state(legacy=False)["bit_generator"]  # noqa: NPY002
    try:
        if not isinstance(part, Mapping):
            raise TypeError(f"it is a {type(part).__name__} and not a dict")  # noqa: TRY301
        stored = part["bit_generator"]
        state: Any = {**part, "state": dict(part["state"])}
        if stored == here:
            np.random.RandomState(getattr(np.random, here)(0)).set_state(state)
        if stored == "MT19937" and not 0 <= state["state"]["pos"] <= _MT19937_WORDS:
            # NumPy takes it, and then reads beyond its memory.
            raise ValueError(f"pos is {state['state']['pos']}")  # noqa: TRY301
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise _malformed("NumPy's global", error) from error
    if stored != here:
        raise LoadError(
            f"NumPy's global random generator is a {here}, and the saved one was a {stored}; "
            "nothing was changed. Set the same kind with numpy.random.set_bit_generator, or load "
            "without the random state"
        )
    return lambda: np.random.set_state(state)  # noqa: NPY002


def _torch_setter(part: object) -> Callable[[], None]:
    state = _tensor("torch's CPU", part)
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise _malformed("torch's CPU", error) from error
    return lambda: torch.set_rng_state(state)


def _cuda_setter(part: object, index: int) -> Callable[[], None]:
    state = _tensor(f"CUDA device {index}'s", part)
    try:
        torch.Generator(device=f"cuda:{index}").set_state(state)
    except (RuntimeError, TypeError) as error:
        raise _malformed(f"CUDA device {index}'s", error) from error
    return lambda: torch.cuda.set_rng_state(state, index)


def _tensor(whose: str, part: object) -> torch.Tensor:
    if not isinstance(part, torch.Tensor) or part.dtype != torch.uint8:
        raise _malformed(whose, "it is no tensor of bytes")
    return part.detach().cpu().clone()


def _listed(part: object) -> list[object]:
    if not isinstance(part, list | tuple):
        raise _malformed("CUDA's", f"it is a {type(part).__name__} and not a list")
    return list(part)


def _malformed(whose: str, why: object) -> LoadError:
    return LoadError(
        f"the saved state of {whose} random generator cannot be restored: {why}. Nothing was "
        "changed; load without the random state, or from another checkpoint"
    )
