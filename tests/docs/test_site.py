"""The documents as one whole: every link leads somewhere, and the site has every page."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import holdfast

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))]
DOCUMENTS += [ROOT / "CONTRIBUTING.md"]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def prose(document):
    """A document without its code."""
    text = document.read_text(encoding="utf-8")
    return re.sub(r"(?ms)^ *(`{3,}).*?^ *\1 *$|<!--.*?-->", "", text)


def anchors(document):
    """The headings of a document as GitHub names them in links."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(document))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def pages(nav):
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages(part)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (document.parent / name).resolve() if name else document
        assert there.is_relative_to(ROOT), target
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def test_the_site_has_every_document():
    listed = pages(SITE["nav"])
    assert len(listed) == len(set(listed))
    documents = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    made = {"changes.md", "contributing.md"}
    examples = {page for page in listed if page.startswith("examples/")}
    assert set(listed) == documents | made | examples
    for page in examples:
        assert (ROOT / page).with_suffix(".py").exists()


def test_the_reference_has_every_package():
    reference = "\n".join(path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"(?m)^::: (holdfast[\w.]*)$", reference))
    for name in holdfast.__all__:
        if importlib.util.find_spec(f"holdfast.{name}") is None or name == "cli":
            continue
        inner = holdfast.integrations.__all__ if name == "integrations" else ()
        wanted = {f"holdfast.{name}.{each}" for each in inner} or {f"holdfast.{name}"}
        assert wanted <= shown


@pytest.mark.timeout(600)
def test_it_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason='pip install -c constraints.txt -e ".[docs]"')
    build = [sys.executable, "-W", "error", "-m", "mkdocs", "build", "--strict"]
    job = subprocess.run(
        [*build, "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert job.returncode == 0, job.stderr
    assert all(line.startswith("INFO ") for line in job.stderr.splitlines()), job.stderr
    html = "".join(path.read_text("utf-8") for path in (tmp_path / "site").rglob("*.html"))
    fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', html)
    assert not fetched  # the site needs nothing from the network
