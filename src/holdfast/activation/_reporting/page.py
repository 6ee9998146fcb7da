"""A plan's report as one HTML page. Knows the page's parts, not how its pictures are drawn.

The page needs nothing else: no script is in it, nothing is fetched, and its content policy forbids
both, so that it can be mailed, kept and opened anywhere.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.activation._reporting.curve import curve_key, curve_picture
from holdfast.activation._reporting.drawing import Markup, Size, element, joined, words
from holdfast.activation._reporting.folding import Fold, folded, kind_of, number
from holdfast.activation._reporting.report import PlanReport
from holdfast.activation._reporting.style import STYLE
from holdfast.activation._reporting.summary import (
    Figure,
    budget_in_sight,
    closing,
    figures,
    subject,
    verdict,
)
from holdfast.activation._reporting.timeline import timeline_picture
from holdfast.activation._reporting.words import exactly, in_bytes, in_seconds, more

# A picture is drawn twice and one is shown, by the width of the screen: text that is scaled with
# its picture cannot be read on a phone.
_TIMELINES: Final = (
    Size(class_="wide", width=1000, height=380, left=72, points=1200),
    Size(class_="narrow", width=350, height=320, left=62, points=400),
)
_CURVES: Final = (
    Size(class_="wide", width=1000, height=300, left=72, points=0),
    Size(class_="narrow", width=350, height=280, left=56, points=0),
)
_OVER: Final = "all bytes over what is resident when the step begins"
_MEANINGS: Final = {
    "keep": "keeps all it saves",
    "recipes": "drops some tensors, remakes each by its own op",
    "input": "keeps its input, runs again in backward",
    "segment": "several keep one input, run again in backward",
    "moved": "keeps what it saves on disk or in host memory",
}


def page(report: PlanReport) -> str:
    """The report as a page of its own, to be written as UTF-8. It makes no request of any kind."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", words(f"Activation plan of {report.model}")),
        element("style", Markup(STYLE)),
    )
    main = element(
        "main",
        element("h1", words(f"Activation plan of {report.model}")),
        element("p", words(f"{subject(report)}; {_OVER}"), class_="dim"),
        element("p", _unbroken(verdict(report)), class_="verdict"),
        element("dl", *map(_figure, figures(report)), class_="figures"),
        _timelines(report),
        _curves(report),
        _table(report),
        _notes(report),
        element("p", words(closing(report)), class_="foot"),
    )
    return f"<!doctype html>\n{element('html', head, element('body', main), lang='en')}\n"


def _policy() -> str:
    # The style is allowed by its digest: a style attribute that slipped in would do nothing.
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _unbroken(text: str) -> Markup:
    return Markup(words(text).replace(" %", "&nbsp;%"))


def _figure(figure: Figure) -> Markup:
    return element(
        "div",
        element("dt", words(figure.name)),
        element("dd", element("strong", words(figure.shown), title=figure.exact)),
        element("dd", _unbroken(figure.about)),
        class_="figure",
    )


def _timelines(report: PlanReport) -> Markup:
    kinds = dict.fromkeys(kind_of(row.choice) for row in report.rows)
    key = (
        element("li", words(f"{kind}: {_MEANINGS[kind]}"), class_=f"mark {kind}") for kind in kinds
    )
    about = (
        "Live bytes at successive torch calls. The two steps are lined up where their stages begin "
        "and end."
    )
    if not budget_in_sight(report):
        about += f" The budget of {in_bytes(report.budget_bytes)} is far above the picture."
    return _shown(
        "Memory over one step",
        about,
        *(timeline_picture(report, size) for size in _TIMELINES),
        element("ul", *key, class_="key"),
    )


def _curves(report: PlanReport) -> Markup:
    return _shown(
        "Time against memory",
        "The least extra time a step can have within a budget. No plan reaches the shaded part.",
        *(curve_picture(report, size) for size in _CURVES),
        element("ul", *curve_key(report), class_="key"),
    )


def _shown(heading: str, about: str, *inside: Markup) -> Markup:
    return element(
        "section",
        element("h2", words(heading)),
        element("figure", element("figcaption", words(about)), *inside),
    )


def _table(report: PlanReport) -> Markup:
    folds = folded(report.rows)
    names = ("Stage", "Choice", "Kept", "Extra time", "Forward", "What is remade")
    classes = ("name", "way", "kept", "number", "number", "detail")
    head = (
        element("th", words(name), scope="col", role="columnheader", class_=class_)
        for name, class_ in zip(names, classes, strict=True)
    )
    # Roles are given because a phone lays the table out as cards, which would unmake it otherwise.
    return element(
        "section",
        element("h2", words("Stages")),
        element(
            "table",
            element("thead", element("tr", *head, role="row"), role="rowgroup"),
            element("tbody", *_rows(folds), role="rowgroup"),
            element("tfoot", _total(folds), role="rowgroup"),
            role="table",
        ),
    )


def _rows(folds: Sequence[Fold]) -> Iterator[Markup]:
    widest = max((max(_each(fold)) for fold in folds), default=0)
    for fold in folds:
        kind = kind_of(fold.choice)
        yield _row(
            _heading(fold),
            _cell(element("span", words(fold.choice), class_=f"mark {kind}"), class_="way"),
            _cell(_bar(fold, widest), *_kept(fold), class_="kept"),
            _cell(words(_extra(fold.extra_s)), class_="number", data_name="extra"),
            _cell(words(in_seconds(fold.forward_s)), class_="number", data_name="forward"),
            _cell(words(fold.detail), class_="detail"),
        )


def _total(folds: Sequence[Fold]) -> Markup:
    kept, kept_all = (
        sum(fold.kept_bytes for fold in folds),
        sum(fold.kept_all_bytes for fold in folds),
    )
    return _row(
        element("th", words("All"), scope="row", role="rowheader"),
        _cell(),
        _cell(_of(kept, kept_all), class_="kept"),
        _cell(
            words(_extra(sum(fold.extra_s for fold in folds))), class_="number", data_name="extra"
        ),
        _cell(
            words(in_seconds(sum(fold.forward_s for fold in folds))),
            class_="number",
            data_name="forward",
        ),
        _cell(),
    )


def _row(*cells: Markup) -> Markup:
    return element("tr", *cells, role="row")


def _heading(fold: Fold) -> Markup:
    names = [words(fold.first)]
    if fold.count > 1:
        names += [Markup("&nbsp;… "), words(fold.last), element("small", words(number(fold)))]
    return element("th", *names, scope="row", role="rowheader")


def _cell(*inside: Markup, **attributes: str) -> Markup:
    return element("td", *inside, role="cell", **attributes)


def _kept(fold: Fold) -> Iterator[Markup]:
    yield _of(fold.kept_bytes, fold.kept_all_bytes)
    if fold.alike:
        kept, kept_all = (total // fold.count for total in (fold.kept_bytes, fold.kept_all_bytes))
        yield element("small", words(f"{in_bytes(kept)} of {in_bytes(kept_all)} each"))


def _of(kept: int, kept_all: int) -> Markup:
    return element(
        "span",
        words(f"{in_bytes(kept)} of {in_bytes(kept_all)}"),
        title=f"{exactly(kept)} of {exactly(kept_all)}",
    )


def _bar(fold: Fold, widest: float) -> Markup:
    """What one stage keeps, on what it would; as long as it is large among the stages."""
    kept, kept_all = (each / widest * 100 if widest else 0.0 for each in _each(fold))
    return element(
        "svg",
        element("rect", class_="all", width=kept_all, height=8),
        element("rect", class_="some", width=kept, height=8),
        class_="bar",
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _each(fold: Fold) -> tuple[float, float]:
    return fold.kept_bytes / fold.count, fold.kept_all_bytes / fold.count


def _extra(duration: float) -> str:
    return more(duration) if duration else "none"


def _notes(report: PlanReport) -> Markup:
    if not report.notes:
        return words("")
    items = (element("li", words(note)) for note in report.notes)
    return joined(
        [element("section", element("h2", words("Notes")), element("ul", *items, class_="notes"))]
    )
