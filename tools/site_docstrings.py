"""Puts the first paragraph of a docstring on one line: that is what the site's lists show.

An extension of griffe, which reads the docstrings; named in mkdocs.yml.
"""
# ruff: noqa: INP001 -- griffe loads it by its path

from typing import Any

import griffe


class FirstParagraph(griffe.Extension):
    """Joins the lines of first paragraphs."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            head, gap, rest = obj.docstring.value.partition("\n\n")
            obj.docstring.value = " ".join(head.split("\n")) + gap + rest
