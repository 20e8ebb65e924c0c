"""What `classify` says of a checkpoint as text: of one at length, of many in a few lines each."""

import numpy as np

from mechinterp.analysis.learners.baseline_comparison import standing_text
from mechinterp.analysis.multi_layer.classify import LayeredClassification
from mechinterp.analysis.number_format import digits, explained, with_error
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.report.text import ROWS, frame_text, wrapped


def classification_text(
    found: Classification | LayeredClassification, *, wide: bool = False
) -> str:
    """The pattern, the verdict, the loss beside those of ridge regression and of 0, and the table of heads."""
    standing = standing_text(found.loss, found.task, found.assumed)
    lines = [found.pattern, *str(found.verdict).splitlines(), *standing.splitlines()]
    if not wide:
        said = wrapped("\n".join(lines), "  ")
        return "\n".join((said, "", heads_header(found), *_head_lines(found)))
    frame = found.to_frame()
    chance = ""
    if isinstance(found, Classification):
        chance = f"\n\n{wrapped(_ranges(found), '  ')}"
        least = 1 / (len(frame) * found.n_random)
        for name in frame.columns[frame.columns.str.endswith("_p")]:
            frame[name] = [f"< {least:.2g}" if p <= least else f"{p:.2g}" for p in frame[name]]
    said = wrapped("\n".join([*lines, f"Reason: {found.reason}."]), "  ")
    return f"{said}\n\n{frame_text(frame, wide=True)}{chance}"


def _ranges(found: Classification) -> str:
    """Where random weights lie in the numbers of the table and of the evidence."""
    ranges = {
        name: f"{name} {digits(low)} to {digits(high)}"
        for name, (low, high) in found.random_ranges.items()
        if low < high
    }
    return f"Of {found.n_random} models with random weights 90% lie within {', '.join(ranges.values())}."


def brief_text(found: Classification | LayeredClassification) -> str:
    """One of many: pattern, R², loss, and the heads without a header."""
    loss = found.loss
    line = (
        f"  loss {digits(loss.model)} y² (ridge {digits(loss.ridge)}, predicting 0 "
        f"{digits(loss.zero)})"
    )
    if found.pattern in ("undetermined", "unstructured"):
        line += f"; {found.verdict.computes.partition(': ')[2]}"
    elif isinstance(found, Classification):
        line += f", {explained(found.learner.r2, found.learner.r2_sem)}"
    elif found.algorithm is not None and found.algorithm.best is not None:
        best = found.algorithm.best
        line += f", {explained(found.algorithm.r2[best, 0], found.algorithm.r2_sem[best, 0])}"
    if found.task_doubt:
        line += f"; {found.task_doubt}"
    return "\n".join([found.pattern, wrapped(line, "  "), *_head_lines(found)])


ONE_LAYER = f"""Heads: share of the output; omega and mu are what one multiplies x·x and y by
  head  label           share  omega (1/x²)  {"mu":>18}"""
LAYERS = """Heads: what the excess risk rises by when one is masked
  head                    rise (y²)  share of its layer's rises"""


def heads_header(found: Classification | LayeredClassification) -> str:
    """Above the heads of a model, or of many of its kind."""
    return LAYERS if isinstance(found, LayeredClassification) else ONE_LAYER


def _head_lines(found: Classification | LayeredClassification) -> list[str]:
    if isinstance(found, LayeredClassification):
        frame = found.to_frame()
        if len(frame) > ROWS:
            frame = frame.nlargest(ROWS, "excess_risk_increase")
        lines = [
            f"  {row.label:<6}  {with_error(row.excess_risk_increase, row.sem):>25}  {digits(row.importance):>25}"
            for row in frame.itertuples()
        ]
        left = found.increase.size - len(frame)
        return [*lines, f"  ... and {left} more heads, of less: --wide"] if left else lines
    rows = zip(found.labels, found.share, found.omega_form, found.circuits.mu, strict=True)
    return [
        f"  {head:>4}  {label:<12}  {digits(share):>7}  {digits(omega):>12}  {_mu(mu):>18}"
        for head, (label, share, omega, mu) in enumerate(rows)
    ]


def _mu(values: np.ndarray) -> str:
    """One number per response, of more than three their range."""
    if len(values) > 3:
        return f"{digits(values.min())} to {digits(values.max())}"
    return ", ".join(map(digits, values))
