"""``holdfast doctor``: what this machine and a storage can do, and what to do about it."""

from typing import Annotated, Any

import typer

from holdfast.cli._arguments import AsJson
from holdfast.cli._doctor_disk import disk_findings
from holdfast.cli._doctor_machine import machine_findings
from holdfast.cli._doctor_storage import Finding, object_findings
from holdfast.cli._exits import Exit
from holdfast.cli._place import as_usage, path_of
from holdfast.cli._text import put_json, put_table
from holdfast.storage import open_storage

_MIB = 1024 * 1024


def run(
    store: Annotated[
        str,
        typer.Argument(metavar="STORE", help="A folder or URL. It need not be there yet."),
    ] = ".",
    *,
    mib: Annotated[
        int, typer.Option("--size", metavar="MIB", min=1, help="How much to write and read.")
    ] = 256,
    as_json: AsJson = False,
) -> int:
    """Writes files of its own there and removes them again. The exit code is 1 if anything is
    bad."""
    path = path_of(store)
    with as_usage():
        storage = open_storage(store)
    findings = machine_findings()
    if path is not None:
        findings += disk_findings(path, mib * _MIB)
    else:
        findings += object_findings(store, mib * _MIB)
    if as_json:
        put_json({"store": storage.url, "findings": [_told(each) for each in findings]})
    else:
        rows = [(each.verdict, each.what, each.value, each.advice) for each in findings]
        put_table(("", "what", "found", "advice"), rows)
    return Exit.FOUND if any(each.verdict == "bad" for each in findings) else Exit.OK


def _told(finding: Finding) -> dict[str, Any]:
    return {
        "what": finding.what,
        "verdict": finding.verdict,
        "found": finding.value,
        "advice": finding.advice,
    }
