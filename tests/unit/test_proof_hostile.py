"""Short runs of the campaigns of hostile files, of fuzzing and of object stores, and that each of
them sees what is broken."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest

PROOF = pathlib.Path(__file__).parents[2] / "proof"


def proof(name):
    """A module of the campaigns."""
    if str(PROOF) not in sys.path:
        sys.path.append(str(PROOF))
    return importlib.import_module(name)


@pytest.mark.timeout(300)
def test_hostile_files_are_refused_and_broken_readers_are_seen():
    program = pathlib.Path(__file__).with_name("hostile_demonstration.py")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["cases"], told["violations"]) == (40, [])
    seen = {name: " ".join(problems) for name, problems in told["broken"].items()}
    assert "taken for good" in seen["takes it"]
    assert "KeyError instead of a CheckpointError" in seen["another error"]
    assert "ran code of the file or wrote outside of the root: ['./made']" in seen["unpickles"]
    assert "ran a program: os.system" in seen["starts a program"]
    assert "wrote outside of the root: ['./relative']" in seen["writes beside"]
    assert "MemoryError" in seen["takes memory"]
    assert "SIGSEGV" in seen["dies"]
    assert "no end in 3 s" in seen["hangs"]


def test_there_are_as_many_hostile_files_as_were_promised():
    assert len(proof("_hostile").catalog_cases()) >= 500


@pytest.mark.parametrize("name", ["record's body", "compressed chunk", "shard header"])
def test_a_parser_takes_what_it_is_given(name):
    outcome = proof("fuzzing").fuzzed(name, 1, 500)
    assert (outcome.cases, outcome.violations) == (500, ())


def test_a_broken_parser_is_found_and_its_input_fails_again():
    fuzz, parsers = proof("_fuzz"), proof("_parsers")

    def broken(data):
        whole = json.loads(data) if data.startswith(b"{") and data.endswith(b"}") else {}
        return [] if whole.get("version") == 1 else whole["version"]

    good = [b'{"version":1,"attempt":"a"}']
    parser = parsers.Parser(
        name="broken", seeds=lambda: good, parse=broken, runs=1000, is_json=True
    )
    assert fuzz.tried(broken, good[0]) is None
    count, data, why = fuzz.changed_at_random(parser, 3, 1000)
    assert 1 < count < 1000
    assert why == fuzz.tried(broken, data)
    assert fuzz.changed_at_random(parser, 3, 1000) == (count, data, why)


def test_what_a_seed_does_to_bytes_is_always_the_same():
    import random

    mutated = proof("_fuzz_inputs").mutated
    data = b'{"a":[1,2,{"b":"text"}]}'
    one, other = random.Random(5), random.Random(5)
    first = [mutated(data, [data], one, is_json=True) for _ in range(300)]
    assert first == [mutated(data, [data], other, is_json=True) for _ in range(300)]
    assert len(set(first)) > 200


@pytest.mark.timeout(300)
def test_a_bucket_that_behaves_badly_loses_nothing_and_a_lost_commit_is_seen():
    store = proof("object_store")
    from holdfast.storage._wrapped import WrappedStorage

    class Forgetful(WrappedStorage):
        """Says of a commit record that it is there, and has it not."""

        def create(self, key, data):
            info = self._inner.create(key, data)
            if key.endswith("metadata.json"):
                self._inner.delete(key)
            return info

        def _through(self, _method, _key, call, /):
            return call()

    with store.server() as url:
        world = store.schedule(url, 1)
        assert world.problems == []
        assert world.facts["saves acknowledged"] > 0
        assert world.facts["requests faulted"] > 0
        broken = store.schedule(url, 2, 0.0, Forgetful)
        assert any("which nothing explains" in problem for problem in broken.problems)


def test_a_retry_that_no_budget_paid_is_seen():
    store = proof("object_store")
    from holdfast.errors import TransientStorageError
    from holdfast.resilience import RetryPolicy
    from holdfast.storage import MemoryStorage, retrying
    from holdfast.storage._wrapped import WrappedStorage

    class Flaky(WrappedStorage):
        """Does what it is told, and answers from the second time on."""

        def __init__(self, storage):
            super().__init__(storage)
            self._told = set()

        def _through(self, method, key, call, /):
            answer = call()
            if (method, key) not in self._told:
                self._told.add((method, key))
                raise TransientStorageError("not now")
            return answer

    def metered(budget_of):
        meter = store.Meter()
        policy = RetryPolicy(max_retries=5, initial_delay_s=0.001, max_delay_s=0.001)
        tried = store.Told(Flaky(MemoryStorage()), meter.attempt)
        storage = store.Told(retrying(tried, policy, budget=budget_of(meter)), meter.begin)
        for key in "abc":
            storage.stat(storage.create(key, b"1").key)
        assert [info.key for info in storage.list()] == [*"abc"]
        return meter

    paid = metered(store.CountedBudget)
    assert (paid.calls, paid.paid, [*paid.problems()]) == (6, paid.retries, [])
    assert paid.retries > 0
    unpaid = metered(lambda _: None)
    assert [*unpaid.problems()] == [f"6 calls were retried {unpaid.retries} times, 0 of them paid"]
