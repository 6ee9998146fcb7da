"""The campaign ``bit_rot`` of ``make proof``: what holdfast notices, and that it would be told if
holdfast did not."""

import random

import proof_tools  # noqa: F401 -- the harness is beside src, not in it
import pytest
from rotting import Rotten, Wound

import bit_rot
from _subjects import HOLDFAST, Holdfast, TorchSave, state_of, value_of
from holdfast.errors import CheckpointError, CorruptedError
from holdfast.format import CompressionLevel


def tally_of(harm, *arguments, cases=60, **more):
    tally = bit_rot.Tally()
    harm(tally, *arguments, random.Random(5), cases, **more)
    return tally


def test_holdfast_notices_every_wound():
    tally = tally_of(bit_rot.harm_in_memory)
    assert (tally.cases, tally.violated, tally.told) == (60, 0, [])
    assert tally.facts["noticed and located"] == 60
    disk = tally_of(bit_rot.harm_on_disk, Holdfast(500))
    assert (disk.cases, disk.violated, disk.told) == (60, 0, [])
    kinds = ("flipped bits", "zeroed blocks", "exchanged blocks", "wrong lengths")
    assert all(disk.facts[kind] for kind in kinds)


class Trusting(Holdfast):
    """Reads holdfast's files, and believes them."""

    def load(self, folder):
        from safetensors.torch import load_file

        (path,) = folder.glob("latest/*.safetensors")
        found = load_file(path)
        return value_of({name: found[name] for name in state_of(0)})


class Mute(Holdfast):
    """Notices, and says nothing of where."""

    def load(self, folder):
        try:
            return super().load(folder)
        except Exception as error:
            raise ValueError("something is wrong") from error


class Misleading(Holdfast):
    """Notices, and blames a file that is whole."""

    def load(self, folder):
        try:
            return super().load(folder)
        except CheckpointError as error:
            raise CorruptedError("something is wrong", path=folder / "latest") from error


class Forgiving(Holdfast):
    """Loads what it knew before, whatever is there now."""

    def load(self, folder):
        return bit_rot.NEW


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Trusting, "loaded without an error, and it claims to be value 2"),
        (Mute, "names no file"),
        (Misleading, "named latest, not "),
        (Forgiving, "loaded without an error, though no value was wrong"),
    ],
)
def test_a_saver_that_were_broken_would_be_caught(broken, words):
    assert broken.name == HOLDFAST
    tally = tally_of(bit_rot.harm_on_disk, broken(500), cases=40)
    assert tally.violated > 10
    assert any(words in told for told in tally.told)
    assert tally.outcome().violated == tally.violated


class Mistaken(Rotten):
    """Takes the tensors of a file for others."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._places = {
            key: [(start, stop, name[::-1]) for start, stop, name in places]
            for key, places in self._places.items()
        }


class Blind(Rotten):
    """Its catalog never sees the harm."""

    def _said(self, wound):
        for key in wound.files:
            self._storage.delete(key)
            self._storage.create(key, self.files[key])
        return super()._said(wound)


def test_a_catalog_that_names_another_tensor_or_nothing_would_be_caught():
    mistaken = tally_of(bit_rot.harm_in_memory, make=Mistaken)
    assert 0 < mistaken.violated < 60  # those in headers, tables and records are named rightly
    assert "verify named" in mistaken.told[0]
    blind = tally_of(bit_rot.harm_in_memory, make=lambda seed, level, scale: Blind(seed))
    assert blind.violated == 60
    assert "verify found nothing" in blind.told[0]


def test_only_what_compressed_bytes_can_hide_is_of_no_consequence_and_it_is_told_apart():
    def make(seed, _, scale):
        return Blind(seed, CompressionLevel.BALANCED, scale)

    tally = tally_of(bit_rot.harm_in_memory, make=make)
    assert tally.facts[bit_rot.NO_CONSEQUENCE] > 0
    assert tally.violated > 0  # headers, tables, records and lengths hide nothing
    assert tally.violated + tally.facts[bit_rot.NO_CONSEQUENCE] == tally.cases
    assert tally.facts["noticed and located"] == 0


def test_an_older_record_may_be_told_by_the_files_that_it_misses():
    files = {"latest/metadata.json": b"new", "latest/b": b"2"}
    older = {"latest/metadata.json": b"old", "latest/a": b"1"}
    stale = Wound(kind="stale files", files={"latest/metadata.json": b"old"}, words="")
    cut = Wound(kind="wrong lengths", files={"latest/b": b"", **files}, words="")
    assert bit_rot._places(stale, files, older) == {"metadata.json", "a"}
    assert bit_rot._places(cut, files, older) == set()
    cut = Wound(kind="wrong lengths", files={**files, "latest/b": b""}, words="")
    assert bit_rot._places(cut, files, older) == {"b"}


def test_a_peer_that_verifies_nothing_loads_wrong_values():
    tally = tally_of(bit_rot.harm_on_disk, TorchSave(500), cases=40)
    assert tally.violated == tally.facts["silently wrong"] > 0
    assert tally.facts["refused"] > 0
