"""Runs command lines, each in a process forked from this one, in which torch cannot be imported.

Starting Python and loading NumPy takes longer than any verb. This loads both once; what a line
prints and how it ends is that of a process of its own. Talks in lines of JSON.
"""

import contextlib
import importlib
import io
import json
import os
import sys


def serve():
    sys.modules["torch"] = None  # what import does where it is not installed
    app = importlib.import_module("holdfast.cli._app")
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for verb in app.VERBS:
            app.run([verb, "--help"])
        app.run(["ls", "/nowhere/to/be/found"])  # and what is loaded when a verb runs
    for line in sys.stdin:
        wanted = json.loads(line)
        child = os.fork()
        if child == 0:
            run(wanted)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def run(wanted):
    code = 99
    try:
        for number, name in enumerate(("/dev/null", wanted["out"], wanted["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.environ.update(wanted["env"])
        os.chdir(wanted["cwd"])
        sys.argv = ["holdfast", *wanted["arguments"]]
        if wanted["powerless"] and os.geteuid() == 0:
            os.setuid(65534)  # root may do everything
        importlib.import_module("holdfast.cli").main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
