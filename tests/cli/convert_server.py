"""Runs command lines as ``cli_server`` does, in processes that have torch, and says how they went.

Tells the number of each process, so that it can be killed, and how much more memory it took than
it began with. A largest size of files can be set, as a disk that is full has.
"""

import importlib
import json
import os
import re
import resource
import sys
from pathlib import Path

import cli_server

MODULES = ("torch_read", "torch_write", "dcp_read", "dcp_write")


def serve():
    importlib.import_module("torch")
    importlib.import_module("holdfast.cli._app").run(["ls", "/nowhere/to/be/found"])
    for verb in ("convert", "reshard"):
        importlib.import_module(f"holdfast.cli._{verb}")
    for module in MODULES:
        importlib.import_module(f"holdfast.cli._converting.with_torch.{module}")
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            run(wanted)
        tell(child)
        _, status = os.waitpid(child, 0)
        tell(os.waitstatus_to_exitcode(status))


def tell(number):
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def run(wanted):
    before, mapped = memory("VmRSS"), memory("RssFile")
    end = os._exit

    def told(code):
        # Not what of torch's own code was run for the first time: how much of a library comes with
        # a page of it depends on what the page cache made of the file.
        code_bytes = memory("RssFile") - mapped
        Path(wanted["memory"]).write_text(str(memory("VmHWM") - before - code_bytes))
        end(code)

    os._exit = told
    if wanted["largest"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (wanted["largest"], wanted["largest"]))
    cli_server.run(wanted)


def memory(name):
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1])


if __name__ == "__main__":
    serve()
