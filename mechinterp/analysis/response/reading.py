"""Sentences about a response, by rules on its numbers alone."""

import numpy as np
import pandas as pd

from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.response.frames import Frames, KindFrames
from mechinterp.config import TaskConfig

NOT_LINEAR = 0.15
"""Part of the squared predictions that is not linear in y above which the learner is no linear map."""
NO_FILTER = 0.05
"""Part left by the filter above which it does not describe the learner."""
BY_SIMILARITY = 0.15
"""Share of what the filter leaves that similarity must explain in a kernel."""
NO_INTERACTION = 0.01
"""L^2 D below which pairs do not interact; batch learners have about 1."""
ONLINE = 0.01
"""Effect of earlier pairs, as a fraction of that of later ones, below which a learner is online."""
FORGETS = 0.1
"""Fall of the weight from the newest to the oldest pair below which age does not matter."""
CLEAR_ERRORS = 3
"""Number of standard errors of a difference that is stated."""
POSTERIOR = 0.5
"""Share of what the filter leaves that the posterior mean of a pool must explain."""
EVEN_SHARE = 0.02
"""Share that does not change its sign with y from which on it is stated."""
SPARSITY = 0.1
"""A model uses sparsity if its mismatch under a rotation of x is this fraction of the Bayes learner's."""
FITS = (1.2, 2.0, 1e-6)
"""A form fits if it leaves at most 1.2 times what the free form leaves plus 2 errors, or 1e-6."""
OF_A_SET = ("batch", "no interaction", "filter", "posterior")
"""Classes of learners to whom the age of a pair does not matter."""
ORDER_OF_FORMS = (
    *("1 step", "2 steps", "3 steps", "a / (s + c)", "4 steps", "5 steps", "6 steps"),
)
"""Forms of the filter, the simplest first."""


def form(found: Frames, output: int = 0) -> str:
    """Simplest form of the filter that fits; "free" if none does."""
    forms = found.of_output(found.forms, output).set_index("form")
    factor, errors, rounding = FITS
    limit = max(factor * forms.left["free"] + errors * forms.left_sem["free"], rounding)
    return next((name for name in ORDER_OF_FORMS if forms.left[name] <= limit), "free")


def forgets(found: KindFrames, output: int = 0) -> bool:
    """True if the weight of a pair falls with its age by more than its error and FORGETS."""
    alpha, sem = found.scalar("alpha", output)
    fall = 1 - alpha ** (found.context_length - 1)
    return bool(1 - alpha > CLEAR_ERRORS * sem and fall > FORGETS)


def not_linear(found: KindFrames, output: int = 0) -> float:
    """Part of the squared predictions that is not linear in y.

    On Gaussian tasks, with drift or without, it is the mismatch of f(sum of two y) and the sum of both f, or the part that is even in y if that is
    larger; else what all columns leave.
    """
    rows = found.of_output(found.symmetries, output).set_index("symmetry").mismatch
    mismatch = float(rows.get("sum of two y", np.nan)) if found.sums_follow_law else np.nan
    left = found.of_output(found.left, output).left
    if np.isnan(mismatch):
        return float(left.min())
    return max(mismatch, found.scalar("even in y", output)[0])


def kind(found: KindFrames, output: int = 0) -> str:
    """Class of learner: see docs/response.md for the table."""
    left = found.of_output(found.left, output).set_index("columns").left
    if not_linear(found, output) > NOT_LINEAR:
        return "no linear map"
    without = min(left["filter"], left["+ mean of x"])
    if without > NO_FILTER and left["+ similarity"] < (1 - BY_SIMILARITY) * without:
        return "kernel"
    if left.get("+ posterior", np.inf) < (1 - POSTERIOR) * left["filter"]:
        return "posterior"
    if "later" not in set(found.scalars.name):
        return "forgetting" if forgets(found, output) else "filter"
    later, earlier = (found.scalar(name, output)[0] for name in ("later", "earlier"))
    if max(later, earlier) < NO_INTERACTION:
        return "no interaction with forgetting" if forgets(found, output) else "no interaction"
    if earlier < ONLINE * later:
        return "online"
    return "recursive least squares" if forgets(found, output) else "batch"


def has_filter(found: Frames, output: int = 0) -> bool:
    """True if a filter over directions describes the learner; a form of a filter that leaves most of it says nothing."""
    left = found.of_output(found.left, output).set_index("columns").left
    return bool(left["filter"] <= NO_FILTER)


def headline(found: Frames, output: int = 0) -> str:
    """Class of learner, and the form of its filter or its gate.

    Recursive least squares, and the form of a filter, are names only if the filter describes the learner: both triangles and
    weights that fall with age are measured of other learners, too.
    """
    which = kind(found, output)
    if which == "online":
        eta, gate = (digits(found.scalar(name, output)[0]) for name in ("eta", "gate"))
        return f"online, eta {eta}, gate {gate}"
    if which == "recursive least squares" and not has_filter(found, output):
        alpha = found.scalar("alpha", output)[0]
        return f"pairs interact, weights fall with age, alpha {alpha:.4f}; no known filter"
    if which in ("no interaction with forgetting", "recursive least squares", "forgetting"):
        return f"{which}, alpha {found.scalar('alpha', output)[0]:.4f}"
    if which in OF_A_SET and which != "posterior":
        named = form_in_words(found, output) if has_filter(found, output) else "no known filter"
        return f"{which}, {named}"
    return which


def form_in_words(found: Frames, output: int = 0) -> str:
    """The simplest form that fits, with c for a filter a / (s + c)."""
    fits = form(found, output)
    if fits.endswith(("step", "steps")):
        return f"filter of {fits} of descent"
    c, sem = found.scalar("c", output)
    if np.isnan(sem):
        return f"filter of least squares, c below {digits(c)}"
    beside = ""
    if "c of Bayes" in set(found.scalars.name):
        own = found.scalar("c of Bayes", output)[0]
        beside = f" (Bayes {digits(own)})" if np.isfinite(own) else ""
    name = (
        "ridge-like filter"
        if fits == "a / (s + c)"
        else "filter of no simple form, nearest to ridge"
    )
    return f"{name}, c {with_error(c, sem)}{beside}"


def summary(found: Frames) -> str:
    """Readings of all responses in one sentence."""
    outputs = sorted(set(found.scalars.output)) if "output" in found.scalars else [0]
    texts = ["; ".join(_parts(found, output)) for output in outputs]
    if len(outputs) == 1:
        return texts[0]
    return " | ".join(f"response {n}: {text}" for n, text in zip(outputs, texts, strict=True))


def _parts(found: Frames, output: int) -> list[str]:
    which = kind(found, output)
    alpha, eta, gate = (
        found.scalar(name, output) if name in set(found.scalars.name) else (np.nan, np.nan)
        for name in ("alpha", "eta", "gate")
    )
    first = {
        "no linear map": "no linear map of y",
        "kernel": "weights of pairs follow their similarity to the query, not a filter over directions",
        "no interaction": "pairs do not interact",
        "no interaction with forgetting": f"pairs do not interact, and a weight is multiplied by {with_error(*alpha)} per later pair",
        "recursive least squares": f"pairs interact both ways, and a weight is multiplied by {with_error(*alpha)} per later pair",
        "online": f"only later pairs change the weight of earlier ones: online, eta {with_error(*eta)}, gate {with_error(*gate)}",
        "batch": "pairs are a set",
        "posterior": "predictions are near the posterior mean over the pool of tasks",
        "filter": "weights do not depend on age",
        "forgetting": f"a weight is multiplied by {with_error(*alpha)} per later pair",
    }[which]
    parts = [first]
    left = found.of_output(found.left, output).set_index("columns")
    unknown = which in OF_A_SET and not has_filter(found, output)
    if which not in ("no linear map", "kernel", "online"):
        parts.append("no known filter" if unknown else form_in_words(found, output))
    last = left["left"].idxmin()
    if which == "no linear map":
        share = _percent(left["left"][last], left["left_sem"][last])
        parts.append(f"all columns leave {share} of the squared predictions")
    else:
        parts += [] if unknown else bayes_sentences(found, output)
        share = _percent(left["left"]["filter"], left["left_sem"]["filter"])
        parts.append(f"the filter leaves {share} of the squared predictions")
    mean = found.scalar("mean of x", output)
    if (
        left["left"]["filter"] - left["left"]["+ mean of x"]
        > CLEAR_ERRORS * left.left_sem["+ mean of x"]
    ):
        parts.append(f"the mean of x is subtracted {with_error(*mean)} times")
    if "even in y" in set(found.scalars.name):
        even = found.scalar("even in y", output)
        if even[0] > max(EVEN_SHARE, CLEAR_ERRORS * even[1]):
            parts.append(f"{_percent(*even)} does not change its sign with y")
    return parts


def bayes_sentences(found: Frames, output: int = 0) -> list[str]:
    """Directions whose weight differs from the Bayes learner's by more than 3 errors."""
    rows = found.of_output(found.differences, output)
    if rows.empty:
        return []
    clear = (rows.difference.abs() > CLEAR_ERRORS * rows.difference_sem).to_numpy()
    under = clear & (rows.difference < 0).to_numpy()
    over = clear & (rows.difference > 0).to_numpy()
    s = rows.s.to_numpy()
    texts = []
    for which, text in ((under, "over-shrinks"), (over, "under-shrinks")):
        if not which.any():
            continue
        ends = s[which]
        if which.all():
            texts.append(f"{text} all directions")
        elif which[: which.sum()].all():
            texts.append(f"{text} directions below s {digits(ends[-1])}")
        elif which[-which.sum() :].all():
            texts.append(f"{text} directions above s {digits(ends[0])}")
        elif len(ends) == 1:
            texts.append(f"{text} directions near s {digits(ends[0])}")
        else:
            texts.append(f"{text} directions between s {digits(ends[0])} and {digits(ends[-1])}")
    return texts


def sentences(found: Frames) -> list[str]:
    """The summary, the distance to the Bayes learner, sparsity, and what was not measured."""
    texts = [summary(found)[0].upper() + summary(found)[1:] + "."]
    names = set(found.scalars.name)
    if "share of it in the filter" in names:
        distance, share = (
            found.scalar(name)
            for name in ("squared distance to Bayes", "share of it in the filter")
        )
        if distance[0] > CLEAR_ERRORS * distance[1]:
            texts.append(
                f"Its squared distance to the Bayes learner is {with_error(*distance)} y²; the "
                f"difference of the filters makes up {_percent(*share)} of it."
            )
    if found.uses_sparsity is not None:
        rows = found.of_output(found.symmetries).set_index("symmetry").loc["rotation of x"]
        verb = "uses" if found.uses_sparsity else "does not use"
        texts.append(
            f"It {verb} sparsity: a rotation of x changes {with_error(rows.mismatch, rows.mismatch_sem)} of its "
            f"squared predictions, and {digits(rows.bayes)} of the Bayes learner's."
        )
    disagreement = found.scalar("disagreement")[0]
    if disagreement > CLEAR_ERRORS:
        texts.append(
            f"Filters by gradients and by predictions differ by {digits(disagreement)} standard "
            "errors in the root mean square: y given x is not Gaussian, or f is not linear in y."
        )
    return texts + list(found.notes)


def uses_sparsity(task: TaskConfig | None, symmetries: pd.DataFrame) -> bool | None:
    """True if a rotation of x changes predictions as it changes the Bayes learner's; None if unknown."""
    if task is None or task.sparsity is None:
        return None
    rows = symmetries[symmetries.symmetry == "rotation of x"].iloc[0]
    if np.isnan(rows.bayes):
        return None
    return bool(rows.mismatch >= SPARSITY * rows.bayes)


def _percent(value: float, sem: float) -> str:
    if abs(value) < 5e-7:
        return "0%"
    return f"{with_error(100 * value, 100 * sem)}%"
