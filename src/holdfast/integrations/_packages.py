"""Whether the package is there that an integration is for, and how to get it if it is not."""

import importlib


def require(package: str, integration: str) -> None:
    """``ImportError`` in one line if ``package`` is not installed. What an installed one raises
    when it is imported is raised as it is."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"holdfast.integrations.{integration} needs {package}, which is not installed: "
            f'pip install "holdfast[{integration}]"',
            name=package,
        ) from None
