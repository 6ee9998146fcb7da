"""What a load leaves in the state: tensors with memory of their own, and the right values."""

import torch

import holdfast

PAGE_BYTES = 4096


def saved(path, state):
    holdfast.save(state, path)
    return path


def test_small_tensors_that_are_kept_have_memory_of_their_own(tmp_path):
    state = {f"x{n}": torch.arange(n, n + 5.0) for n in range(20)}
    loaded = holdfast.load(saved(tmp_path / "a", state))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert {tensor.untyped_storage().nbytes() for tensor in loaded.values()} == {20}
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 20


def test_large_tensors_take_at_most_a_page_more_than_they_need(tmp_path):
    state = {"a": torch.rand(3), "b": torch.rand(600_001), "c": torch.rand(500, 700).double()}
    loaded = holdfast.load(saved(tmp_path / "a", state))
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].is_contiguous()
        assert loaded[name].untyped_storage().nbytes() <= tensor.nbytes + PAGE_BYTES


def test_tensors_of_many_shapes_and_dtypes_are_filled_in_place(tmp_path):
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    shapes = ((), (0,), (3,), (2, 0), (4, 5), (70_000,), (300, 400))
    state = {
        f"{dtype}{shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype in dtypes
        for shape in shapes
    }
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    before = dict(into)
    holdfast.load(saved(tmp_path / "a", state), into=into)
    for name, tensor in state.items():
        assert into[name] is before[name]
        assert torch.equal(into[name], tensor), name


def test_a_tensor_of_no_device_in_a_tree_becomes_one_with_values(tmp_path):
    into = {"x": torch.empty(3, device="meta")}
    holdfast.load(saved(tmp_path / "a", {"x": torch.arange(3.0)}), into=into)
    assert torch.equal(into["x"], torch.arange(3.0))
    assert into["x"].untyped_storage().nbytes() == 12


def test_a_view_that_stands_for_other_values_is_stored_by_its_own(tmp_path):
    plain = torch.tensor([1 + 2j, 3 - 4j])
    loaded = holdfast.load(saved(tmp_path / "a", {"plain": plain, "conjugate": plain.conj()}))
    assert torch.equal(loaded["plain"], plain)
    assert torch.equal(loaded["conjugate"], plain.conj().resolve_conj())


def test_a_tensor_that_was_made_without_history_is_filled(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(4))
    with torch.no_grad():
        part = parameter[1:3]
    holdfast.load(saved(tmp_path / "a", {"x": torch.ones(2)}), into={"x": part})
    assert parameter.tolist() == [0, 1, 1, 0]
