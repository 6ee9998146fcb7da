"""A plugin for pytest: ``--proof-slice 2/7`` runs the third of seven equal parts of what was
collected, in its order, so that tests that share a fixture stay together."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof-slice", default="0/1", metavar="K/N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, parts = map(int, config.getoption("--proof-slice").split("/"))
    start, stop = len(items) * number // parts, len(items) * (number + 1) // parts
    config.hook.pytest_deselected(items=items[:start] + items[stop:])
    items[:] = items[start:stop]


pytest_collection_modifyitems = pytest.hookimpl(trylast=True)(pytest_collection_modifyitems)
