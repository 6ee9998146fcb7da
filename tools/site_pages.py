"""Brings into the site what docs/ does not hold: changes, contributing, and the examples' source.

A hook of mkdocs, named in mkdocs.yml. Documents link to those files where they are in the tree, so
that the links work there too; here they are turned to the pages made of them.
"""
# ruff: noqa: INP001 -- mkdocs loads it by its path

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
MADE = {"CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of other files; of the examples, those in the nav."""
    for source, page in MADE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for page in re.findall(r"examples/\w+\.md", str(config.nav)):
        shown = _shown((ROOT / page).with_suffix(".py"))
        files.append(File.generated(config, page, content=shown))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files outside of docs/ to the pages made of them."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri)
    here = "" if uri in MADE.values() else posixpath.join("docs", folder)

    def turned(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found[1]))
        to = _page_of(target)
        if to is None:
            return found[0]
        return f"]({posixpath.relpath(to, folder or '.')}{found[2] or ''})"

    return LINK.sub(turned, markdown)


def _page_of(target: str) -> str | None:
    """The page made of a file of the tree, or ``None`` if there is none."""
    if target in MADE:
        return MADE[target]
    if target == "README.md":
        return "index.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target.startswith("examples/") and target.endswith(".py"):
        return target.removesuffix(".py") + ".md"
    return None


def _shown(example: Path) -> str:
    """An example as a page: its docstring as text, the rest as code."""
    source = example.read_text("utf-8")
    tree = ast.parse(source)
    told = ast.get_docstring(tree) or ""
    code = "".join(source.splitlines(keepends=True)[tree.body[0].end_lineno :]).lstrip("\n")
    title, _, rest = told.partition("\n")
    name = f"examples/{example.name}"
    return f"# {title.rstrip('.')}\n\n{rest.strip(chr(10))}\n\n`{name}`:\n\n```python\n{code}```\n"
