"""Stores that the tests of the command line share. Those that change one copy it first."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.catalog import Catalog

sys.path.append(str(Path(__file__).parents[1] / "conformance"))  # its S3 server


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """Three checkpoints that differ, one of them compressed."""
    root = tmp_path_factory.mktemp("stores") / "a"
    catalog = Catalog(root)
    random = np.random.default_rng(0)
    base = random.normal(size=(300, 500)).astype(np.float32)
    frozen = random.normal(size=(40, 50))
    for step in (100, 200, 300):
        weight = base + np.float32(step)
        layers = [{"w": np.full((4, 4), nth, np.float32), "b": np.zeros(4)} for nth in range(80)]
        state = {"model": {"weight": weight, "frozen": frozen, "layers": layers}, "epoch": step}
        catalog.write(
            f"step_{step}",
            state,
            step=step,
            metrics={"loss": 1 / step, "accuracy": step / 1000},
            custom={"git": "abc123", "odd": float("nan")},
            compression="fast" if step == 300 else "none",
        )
    return root


@pytest.fixture
def own_store(store, tmp_path):
    """A copy, to be changed."""
    shutil.copytree(store, tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture(scope="session")
def bucket(tmp_path_factory):
    """The variables that lead to an S3 server with one bucket, ``bucket``."""
    import urllib.request

    from _servers import moto_server

    with moto_server(tmp_path_factory.mktemp("moto") / "log") as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "word",
            "AWS_REGION": "us-east-1",
        }
