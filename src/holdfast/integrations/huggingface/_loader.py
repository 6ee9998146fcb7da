"""Where in its data a loop over a loader of Accelerate is, and how another process goes on there.

Knows no checkpoint: what is kept is ``state_dict``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.data_loader import SeedableRandomSampler, skip_first_batches  # type: ignore[import-untyped]

from holdfast.distributed._rng import RngFill, capture_rng


@dataclass(slots=True, eq=False)
class Loader:
    """Where a prepared loader is: how many batches of an epoch were given, and what the order of
    its data comes from, when the epoch began and now. That may be the random generators of all."""

    loader: Any
    every: Sequence["Loader"] = field(repr=False)
    """All that are prepared, this one too."""
    done: int = 0
    order: dict[str, Any] = field(default_factory=dict)
    rng: Mapping[str, object] = field(default_factory=capture_rng)
    loop: object | None = None
    """The loop that is under way, here or, after ``resume``, when it was saved; ``None`` if there
    is none, or it was left by ``break``."""
    left_out: int = 0
    """How many batches the next epoch leaves out, as they were given before."""
    anew: Mapping[str, Any] = field(default_factory=dict)
    """What the order comes from if the next epoch leaves nothing out after all."""
    given: int = 0
    """How many batches, and ends of epochs, there were since ``resume``."""

    def state_dict(self) -> dict[str, object]:
        # A process in the loop over another goes on with that, and would begin anew here.
        is_left = self.loop is None and any(each.loop is not None for each in self.every)
        return {
            "done": 0 if is_left else self.done,
            "order": self.order,
            "rng": self.rng,
            "now": self.anew if self.left_out else self._order(),
            "is_open": self.loop is not None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = self._order().keys()
        if state["now"].keys() != names:
            raise ValueError(
                f"the order of a data loader was saved as {', '.join(state['now'])}, and would be "
                f"{', '.join(names)} now; prepare it as the run was that was saved"
            )
        RngFill(state["rng"])  # refused here, and not in the middle of the training
        done = int(state["done"])
        is_over = _is_end(self.loader, done)
        self.done = self.left_out = 0 if is_over else done
        self.order, self.rng, self.anew = dict(state["order"]), state["rng"], state["now"]
        self.loop = object() if self.left_out and state["is_open"] else None
        self.given = 0
        self._put(self.order if self.left_out else self.anew)
        self.loader.iteration += is_over  # which it counts after its last batch was given

    def batches(self, where_to_go_on: Callable[[], Mapping[str, object]]) -> Iterator[Any]:
        """One epoch, or what is left of it. For the latter the generators are set back, as the
        order may come from them; just before the first batch is given, since to set up a loader
        draws random numbers too, or if there is none, they are put ``where_to_go_on`` says."""
        if self.left_out and self._is_passed_by():
            self.left_out = 0
            self._put(self.anew)
        left_out, self.left_out = self.left_out, 0
        way_back = RngFill(where_to_go_on()) if left_out else None
        if left_out:
            RngFill(self.rng).apply()
        self.done, self.order, self.rng = left_out, self._order(), capture_rng()
        around = [(e, e.done) for e in self.every if e is not self and e.loop is not None]
        self.loop = loop = object()
        loader = self.loader
        try:
            if left_out:
                loader = skip_first_batches(loader, left_out)
            for batch in loader:
                if way_back is not None:
                    way_back.apply()
                    way_back = None
                self.done += 1
                self.given += 1
                yield batch
            self.done, self.loader.iteration = 0, loader.iteration
            self.given += 1
        except GeneratorExit:
            is_inside = any(e.loop is not None and e.done == done for e, done in around)
            if is_inside and self.loop is loop:
                self.done = 0
            raise
        finally:
            if way_back is not None:
                way_back.apply()
            if self.loop is loop:  # and no later one has begun
                self.loop = None
                loader.end()  # else Accelerate takes the last batch of others for none

    def _is_passed_by(self) -> bool:
        """Whether this was left by ``break`` when it was saved, and the process has not gone on
        with it. Loaders that are gone through side by side give one batch before each other."""
        return self.loop is None and any(e.given > 1 for e in self.every if e is not self)

    def _order(self) -> dict[str, Any]:
        """What the order of an epoch comes from, beside the generators of all."""
        found: dict[str, Any] = {"iteration": self.loader.iteration}
        sampler = self.loader.get_sampler()
        if isinstance(sampler, SeedableRandomSampler):
            found["seed"] = sampler.initial_seed
        elif self._generator is not None:
            found["generator"] = self._generator.get_state()
        return found

    def _put(self, order: Mapping[str, Any]) -> None:
        self.loader.iteration = int(order["iteration"])
        if "seed" in order:
            self.loader.get_sampler().initial_seed = int(order["seed"])
        elif "generator" in order:
            self._generator.set_state(order["generator"])

    @property
    def _generator(self) -> Any:
        """The sampler's own, or the one that Accelerate keeps alike on all ranks."""
        own = getattr(self.loader.get_sampler(), "generator", None)
        return getattr(self.loader, "synchronized_generator", None) if own is None else own


def _is_end(loader: Any, done: int) -> bool:
    try:
        return done >= len(loader)
    except TypeError:  # of an iterable dataset without a length
        return False
