"""What `classify` says of a checkpoint as text: of one at length, of many in a few lines each."""

from mechinterp.analysis.classified import Classified
from mechinterp.analysis.number_format import digits
from mechinterp.report.text import ROWS, wrapped
from mechinterp.report.to_text import to_text


def classification_text(found: Classified, *, wide: bool = False) -> str:
    """The pattern, the verdict, the loss beside those of ridge regression and of 0, and the table of heads."""
    if wide:
        notes = [wrapped(f"\n{text}", "  ") for text in found.notes]
        return "\n".join([found.pattern, to_text("classify", found, wide=True), *notes])
    said = wrapped("\n".join([found.pattern, *found.told_first]), "  ")
    return "\n".join([said, "", found.heads_title, *found.head_lines(ROWS)])


def brief_text(found: Classified) -> str:
    """One of many: pattern, loss, what earned it, and the heads without a header."""
    loss = found.loss
    line = (
        f"  loss {digits(loss.model)} y² (ridge {digits(loss.ridge)}, predicting 0 "
        f"{digits(loss.zero)}){found.brief}"
    )
    if found.task_doubt:
        line += f"; {found.task_doubt}"
    return "\n".join([found.pattern, wrapped(line, "  "), *found.head_lines(ROWS)])
