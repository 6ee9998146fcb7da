"""What importing holdfast brings along, seen from a fresh interpreter."""

import subprocess
import sys

import pytest
import torch

import holdfast

ROOMS = {
    *("catalog", "cli", "contracts", "coordination", "errors", "format", "reshard"),
    *("resilience", "storage", "testing"),
}


def loaded_by(module: str) -> set[str]:
    return loaded_after(f"import {module}")


def loaded_after(code: str, *arguments: str) -> set[str]:
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)", *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return set(run.stdout.split())


def test_import_holdfast_loads_nothing_heavy():
    loaded = loaded_by("holdfast")
    assert "holdfast.errors" in loaded
    assert not loaded & {"torch", "numpy", "tenacity", "msgspec", "asyncio"}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_do_not_load_torch(room):
    assert "torch" not in loaded_by(f"holdfast.{room}")


def test_the_names_of_the_top_are_there_without_loading_what_they_need():
    assert not loaded_after("import holdfast; dir(holdfast)") & {"torch", "numpy"}


def test_only_the_room_of_torch_models_loads_torch():
    assert "torch" in loaded_by("holdfast.distributed")
    assert "torch" not in loaded_after("import holdfast; holdfast.save, holdfast.load")


def test_what_torch_saved_is_read_as_numpy_without_torch(tmp_path):
    holdfast.save({"model": torch.nn.Linear(3, 2), "step": 7}, tmp_path / "last")
    code = "import holdfast; state = holdfast.load(sys.argv[1], as_numpy=True); "
    code += "assert state['step'] == 7 and state['model']['weight'].shape == (2, 3)"
    loaded = loaded_after(code, str(tmp_path / "last"))
    assert "numpy" in loaded
    assert "torch" not in loaded
