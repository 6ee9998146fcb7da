"""Tries to break every promise, and writes down what broke: ``python proof/run.py [campaign ...]``.

A campaign is a module beside this one that has ``CAMPAIGN``; a name that begins with ``_`` is none.
Batches run side by side, each in a process of its own, until every target or ``--minutes`` is
reached. What they found is kept in ``build/proof/batches.jsonl``: a run that was broken off goes on
where it was, as long as its seed and the code are the same. Results of all campaigns are written to
``proof/results/latest.md``, ``latest.html`` and ``latest.json``. A violation comes with the command
that runs its batch again: ``python proof/run.py --again campaign subject seed``.

The exit code is 1 if holdfast broke a promise, 2 if a campaign is broken, and 130 after Ctrl-C.
"""

import sys

from _command import main

if __name__ == "__main__":
    sys.exit(main())
