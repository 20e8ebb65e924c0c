"""Results as text for a terminal; classifications in full, or in a few lines for one of many models."""

from collections.abc import Iterator

import pandas as pd

from mechinterp.analysis.classified import Classified
from mechinterp.analysis.number_format import digits
from mechinterp.analysis.result import Finding, Table, sentences_of, tables_of
from mechinterp.display import ROWS_SHOWN
from mechinterp.report.text import frame_text, wrapped

MOST_HEAD_LINES = 8
"""Most heads that a classification lists."""


def to_text(name: str, result: Finding, *, wide: bool = False) -> str:
    """Sentences and tables of a result.

    Args:
        wide: True: show every row, column and table.
    """
    blocks = [wrapped("\n".join(sentences_of(result)), "  ")]
    tables = tables_of(name, result)
    for table in tables.values():
        if (table.brief or wide) and len(table.frame):
            blocks += _blocks(table, wide=wide, titled=len(tables) > 1 or bool(table.per))
    return "\n".join(blocks)


def _blocks(table: Table, *, wide: bool, titled: bool) -> Iterator[str]:
    """The table, or one table per value of its column `per`; several tables have titles."""
    for value, frame in _parts(table):
        title, shown = table.title, frame.dropna(axis=1, how="all") if table.per else frame
        if not wide:
            empty = [name for name in shown if shown[name].eq("").all()]
            shown = shown.drop(columns=[*empty, *(name for name in table.quiet if name in shown)])
        if len(frame) > ROWS_SHOWN and table.by and not wide:
            shown = shown.sort_values(table.by, ascending=False, kind="stable")
            title += f", largest {table.by.replace('_', ' ')} first"
        if titled:
            yield wrapped(f"\n{title}{f': {value}' if value else ''}")
        yield frame_text(shown, table.units, wide=wide, least_p=table.least_p)


def _parts(table: Table) -> list[tuple[str, pd.DataFrame]]:
    if not table.per:
        return [("", table.frame)]
    groups = table.frame.groupby(table.per, sort=False)
    return [(str(value), part.drop(columns=table.per)) for value, part in groups]


def classification_text(result: Classified, *, wide: bool = False) -> str:
    """Pattern, verdict, loss (with the losses of ridge regression and of predicting 0) and table of heads."""
    if wide:
        return "\n".join([result.label, to_text("classify", result, wide=True)])
    first = wrapped("\n".join([result.label, *result.summary]), "  ")
    return "\n".join([first, "", result.heads_title, *result.head_lines(MOST_HEAD_LINES)])


def brief_text(result: Classified) -> str:
    """Short text for one of many models: pattern, loss, evidence, and the heads without a header."""
    loss = result.loss
    line = (
        f"  loss {digits(loss.model)} y² (ridge {digits(loss.ridge)}, predicting 0 "
        f"{digits(loss.zero)}){result.brief}"
    )
    if result.task_doubt:
        line += f"; {result.task_doubt}"
    return "\n".join([result.label, wrapped(line, "  "), *result.head_lines(MOST_HEAD_LINES)])
