"""Our side of the comparison: ``holdfast.plan`` for a case. Knows nothing of torch's choices."""

import time
from typing import Any

import holdfast
from _fitting_compare import Fitted
from _fitting_models import Case


def fit(case: Case, model: Any, sample: Any, budget_bytes: int) -> Fitted | None:
    names = {id(module): name for name, module in model.named_modules()}
    stages = [names[id(block)] for block in case.blocks(model)]
    began = time.perf_counter()
    try:
        plan = holdfast.plan(model, sample, budget=budget_bytes, loss=case.loss, stages=stages)
    except holdfast.BudgetError:
        return None
    took = time.perf_counter() - began
    return Fitted(
        applied=lambda: plan.applied(model),
        planning_s=took,
        smallest_bytes=plan.summary.smallest_bytes,
    )
