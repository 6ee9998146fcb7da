"""What importing holdfast brings along, seen from a fresh interpreter."""

import subprocess
import sys

import pytest

ROOMS = {
    *("catalog", "contracts", "coordination", "errors", "format", "reshard", "resilience"),
    *("storage", "testing"),
}


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return set(run.stdout.split())


def test_import_holdfast_loads_nothing_heavy():
    loaded = loaded_by("holdfast")
    assert "holdfast.errors" in loaded
    assert not loaded & {"torch", "numpy", "tenacity", "msgspec", "asyncio"}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_do_not_load_torch(room):
    assert "torch" not in loaded_by(f"holdfast.{room}")
