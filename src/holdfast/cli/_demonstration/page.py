"""The demo's report as one HTML page, in the look of a plan's. Knows the page's parts.

As a plan's page it needs nothing else: no script is in it, nothing is fetched, and its content
policy forbids both.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.activation._reporting.drawing import Markup, Size, element, joined, words
from holdfast.activation._reporting.folding import kind_of
from holdfast.activation._reporting.report import PlanReport
from holdfast.activation._reporting.style import STYLE
from holdfast.activation._reporting.timeline import timeline_picture
from holdfast.activation._reporting.words import in_bytes
from holdfast.cli._demonstration.pictures import LOSS_KEY, loss_picture, stall_picture
from holdfast.cli._demonstration.proofs import Proof, Story, failed, in_time

_LOSSES: Final = (
    Size(class_="wide", width=1000, height=430, left=72, points=0),
    Size(class_="narrow", width=350, height=400, left=62, points=0),
)
_TIMELINES: Final = (
    Size(class_="wide", width=1000, height=340, left=72, points=1200),
    Size(class_="narrow", width=350, height=300, left=62, points=400),
)
_STALLS: Final = (
    Size(class_="wide", width=1000, height=0, left=0, points=0),
    Size(class_="narrow", width=350, height=0, left=0, points=0),
)

_WAYS: Final = {
    "keep": "keeps all",
    "recipes": "drops some tensors, makes each again",
    "input": "keeps its input, runs again",
    "segment": "several keep one input, run again",
}

_OWN: Final = """
.line.whole{stroke:var(--before);stroke-width:9;opacity:.45;stroke-linecap:round}
.line.resumed{stroke:var(--after);stroke-width:1.4}
.line.kill{stroke:var(--budget);stroke-dasharray:6 4}
.line.resume{stroke:var(--after);stroke-dasharray:6 4}
.label.kill{fill:var(--budget)}.label.resume{fill:var(--after)}
.spot-killed{fill:var(--card);stroke:var(--input);stroke-width:1.6}
.spot-resumed{fill:var(--after)}
.lane.killed{fill:var(--input);opacity:.45}.lane.resumed{fill:var(--after);opacity:.45}
.save{fill:var(--good);stroke:var(--card);stroke-width:2}
.save.flipped{fill:var(--budget)}.save.torn{fill:var(--card);stroke:var(--budget)}
.strong{font-weight:600;fill:var(--ink)}
rect.all{fill:var(--keep);opacity:.55}rect.some{fill:var(--budget)}
.mark.whole::before{background:var(--before);opacity:.55}
.mark.killed::before{border-radius:6px;border:2px solid var(--input)}
.mark.resumed::before{border-radius:6px;background:var(--after)}
.mark.point.saved::before{border-color:var(--good);background:var(--good)}
.mark.point.flipped::before{border-color:var(--budget);background:var(--budget)}
.mark.point.torn::before{border-color:var(--budget);background:none}
.mark.all::before{background:var(--keep);opacity:.55}.mark.some::before{background:var(--budget)}
thead .claim{width:36%}thead .way{width:9%}
td.way{color:var(--good);font-weight:600}td.way.bad,.verdict.bad{color:var(--budget)}
.verdict.bad{border-color:var(--budget)}
"""
_STYLE: Final = STYLE.replace("@media (max-width:900px)", f"{_OWN}@media (max-width:900px)", 1)


def page(story: Story, proofs: Sequence[Proof], plan: PlanReport, machine: str) -> str:
    """The report as a page of its own, to be written as UTF-8. ``machine`` is where it ran."""
    title = "holdfast demo"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", words(title)),
        element("style", Markup(_STYLE)),
    )
    main = element(
        "main",
        element("h1", words(title)),
        element("p", words(_subject(story)), class_="dim"),
        _verdict(story, proofs),
        element("dl", *_figures(story), class_="figures"),
        _losses(story),
        _memory(plan),
        _stalls(story),
        _table(proofs),
        element("p", words(f"{machine}. All of it took {story.seconds:.0f} s."), class_="foot"),
    )
    return f"<!doctype html>\n{element('html', head, element('body', main), lang='en')}\n"


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _subject(story: Story) -> str:
    began = story.undisturbed.began
    count = f" of {began.parameters / 1e6:.2f} million parameters" if began is not None else ""
    return (
        f"A character GPT{count} learns Shakespeare's sonnets: BF16 weights with FP32 masters, "
        f"{story.course.steps} steps, gloo ranks started by torchrun"
    )


def _verdict(story: Story, proofs: Sequence[Proof]) -> Markup:
    broken = [*failed(proofs)]
    if broken:
        told = f"{len(broken)} of {len(proofs)} proofs FAILED: "
        told += "; ".join(proof.claim for proof in broken)
        return element("p", words(f"{told}."), class_="verdict bad")
    steps = story.course.steps - story.course.resumed
    return element(
        "p",
        words(
            "A rank was killed amid a save and a bit of the newest checkpoint flipped; another "
            f"number of ranks went on, and the losses of all {steps} steps since are, to the last "
            "bit, those of a run that nobody disturbed."
        ),
        class_="verdict",
    )


def _figures(story: Story) -> Iterator[Markup]:
    plan, saves, damage = story.killed.planned, story.saves, story.flipped.damage
    if plan is not None:
        shown = f"{in_bytes(plan.before_bytes)} → {in_bytes(plan.after_bytes)}"
        about = f"activations, measured; the budget was {in_bytes(plan.budget_bytes)}"
        yield _figure("Memory of a step", shown, about)
    steps = range(story.course.resumed + 1, story.course.steps + 1)
    whole, resumed = story.undisturbed.losses, story.resumed.losses
    same = sum(resumed.get(step) == whole.get(step) for step in steps)
    yield _figure("Losses after resuming", f"{same} of {len(steps)}", "the same to the last bit")
    if saves:
        waited, took = max(each.stall_s for each in saves), max(each.total_s for each in saves)
        about = f"at most, for a save; the longest took {in_time(took)}"
        yield _figure("Training waited", in_time(waited), about)
    shown = "found" if damage else "NOT found"
    yield _figure("The flipped bit", shown, f"in {damage[0].tensor}" if damage else "by verify")


def _figure(name: str, shown: str, about: str) -> Markup:
    return element(
        "div",
        element("dt", words(name)),
        element("dd", element("strong", words(shown))),
        element("dd", words(about)),
        class_="figure",
    )


def _losses(story: Story) -> Markup:
    key = (element("li", words(name), class_=f"mark {class_}") for class_, name in LOSS_KEY)
    return _shown(
        "Loss",
        "What was killed and resumed lies on what was not. Below, the two disturbed runs and their "
        "checkpoints.",
        *(loss_picture(story, size) for size in _LOSSES),
        element("ul", *key, class_="key"),
    )


def _memory(plan: PlanReport) -> Markup:
    kinds = dict.fromkeys(kind_of(row.choice) for row in plan.rows)
    key = (element("li", words(f"a block {_WAYS[kind]}"), class_=f"mark {kind}") for kind in kinds)
    return _shown(
        "Memory of a step, before and after",
        "Live bytes at successive torch calls, without and with the plan. The undisturbed run had "
        "no plan: gradients are the same bits.",
        *(timeline_picture(plan, size) for size in _TIMELINES),
        element("ul", *key, class_="key"),
    )


def _stalls(story: Story) -> Markup:
    rate = story.course.write_bytes_per_s / 1e6
    key = (
        element("li", words(name), class_=f"mark {class_}")
        for class_, name in (("all", "saving, while the training goes on"), ("some", "waiting"))
    )
    return _shown(
        "What saves took",
        f"Each rank was held to {rate:g} MB/s, or this small a state would be written before "
        "anybody could look.",
        *(stall_picture(story.saves, size) for size in _STALLS),
        element("ul", *key, class_="key"),
    )


def _shown(heading: str, about: str, *inside: Markup) -> Markup:
    return element(
        "section",
        element("h2", words(heading)),
        element("figure", element("figcaption", words(about)), *inside),
    )


def _table(proofs: Sequence[Proof]) -> Markup:
    names = (("Claim", "claim"), ("", "way"), ("Seen", "detail"))
    head = (
        element("th", words(name), scope="col", role="columnheader", class_=class_)
        for name, class_ in names
    )
    rows = (
        element(
            "tr",
            element("th", words(proof.claim), scope="row", role="rowheader"),
            _cell("holds" if proof.holds else "FAILED", f"way{'' if proof.holds else ' bad'}"),
            _cell(proof.seen, "detail"),
            role="row",
        )
        for proof in proofs
    )
    # Roles are given because a phone lays the table out as cards, which would unmake it otherwise.
    return element(
        "section",
        element("h2", words("Proofs")),
        element(
            "table",
            element("thead", element("tr", *head, role="row"), role="rowgroup"),
            element("tbody", joined(rows), role="rowgroup"),
            role="table",
        ),
    )


def _cell(text: str, class_: str) -> Markup:
    return element("td", words(text), role="cell", class_=class_)
