"""The suite fails for storages that break the contract: for each of them, and in the right test."""

import inspect
import subprocess
import sys
from collections import defaultdict
from xml.etree import ElementTree as ET

import broken_storages
import pytest

BROKEN = [
    suite
    for suite in vars(broken_storages).values()
    if inspect.isclass(suite) and issubclass(suite, broken_storages.Suite) and suite.noticed_by
]


pytestmark = pytest.mark.timeout(600)  # the first test runs all of the suites


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each class, whether each of its tests passed: all of the sound one, one of the others."""
    report = tmp_path_factory.mktemp("report") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--timeout=30"]  # a storage that hangs is one that is noticed
    run = subprocess.run(
        [
            *command,
            f"--junit-xml={report}",
            f"{broken_storages.__file__}::{broken_storages.TestSound.__name__}",
            *(f"{broken_storages.__file__}::{s.__name__}::{s.noticed_by}" for s in BROKEN),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    passed = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        assert case.find("error") is None, ET.tostring(case)
        suite = case.get("classname").rpartition(".")[2]
        passed[suite].append(case.find("failure") is None)
    passed["output"] = run.stdout[-20_000:]
    return passed


def test_a_sound_storage_passes_all_of_it(results):
    assert all(results["TestSound"]), results["output"]
    assert len(results["TestSound"]) >= 100


@pytest.mark.parametrize("suite", BROKEN, ids=lambda suite: suite.__name__)
def test_a_broken_storage_is_noticed(results, suite):
    assert False in results[suite.__name__]
