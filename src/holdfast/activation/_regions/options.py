"""How a region is to be treated, checked once. Knows the words the caller may use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from holdfast.activation._layer_ids import layer_id
from holdfast.activation._regions.streams import stream_of

DETERMINISM_CHECKS = ("default", "none", "values")
CHANGE_CHECKS = ("version", "digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOptions:
    """What ``checkpoint()`` was asked for, beyond the call itself."""

    preserve_rng_state: bool = True
    determinism_check: str = "default"
    early_stop: bool = True
    modules: tuple[Any, ...] = ()
    generators: tuple[Any, ...] = ()
    check: str = "version"
    keep: Callable[[Any], bool] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.determinism_check not in DETERMINISM_CHECKS:
            raise ValueError(
                f"determinism_check should be one of {list(DETERMINISM_CHECKS)}, "
                f"but got {self.determinism_check}"
            )
        if self.check not in CHANGE_CHECKS:
            raise ValueError(f"check must be one of {list(CHANGE_CHECKS)}, not {self.check!r}")
        for module in self.modules:
            if not isinstance(module, Module):
                raise ValueError(  # noqa: TRY004 -- as every refusal here
                    f"modules must be torch.nn.Module objects, not {module!r}"
                )
        for generator in self.generators:
            stream_of(generator)
        if self.generators and not self.preserve_rng_state:
            raise ValueError("generators are not replayed with preserve_rng_state=False")
        if self.keep is not None and not callable(self.keep):
            raise ValueError(f"keep must be a function of a tensor, not {self.keep!r}")
        if self.name is not None:
            layer_id("name", self.name)
