"""Page that compares several checkpoints: settings with their seeds, models, and training curves."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from mechinterp.analysis.comparison import compare
from mechinterp.analysis.registry import Analysis
from mechinterp.analysis.result import Table
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.errors import printable
from mechinterp.display import counted
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.report import to_html
from mechinterp.report.contents import section_of
from mechinterp.report.page import PAGE, Report, require_free, write_page
from mechinterp.report.to_html import Section

LONGEST_TABLE = 1000


def write_comparison(
    checkpoints: Sequence[Checkpoint],
    out: str | Path,
    *,
    left_out: Mapping[str, str] | None = None,
    n_prompts: int = 4096,
    seed: int = 0,
    overwrite: bool = False,
    figures: str = "",
    progress: ProgressCallback = no_progress,
) -> Report:
    """Write `out/index.html`, which compares the checkpoints, and its CSV files.

    Args:
        left_out: Paths that could not be compared, with the reason, to be listed on the page.
        n_prompts: Prompts per classification; losses use five times as many.
        figures: As in `write_report`.
        progress: Optional progress callback.
    Raises:
        ValueError: If there is no checkpoint, or `out` is a file or a nonempty folder without
            `overwrite`.
    Example:
        >>> import tempfile
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> models = [load(f"checkpoints/softmax-h1-s{seed}") for seed in (0, 1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_comparison(models, folder, n_prompts=64).verdict
        '2 models of 1 setting: softmax-h1: kernel_regression 2.'
    """
    out = Path(out)
    require_free(out, overwrite)
    checkpoints = sorted(checkpoints, key=lambda each: natural(each.name))
    found = compare(checkpoints, n_prompts=n_prompts, seed=seed, progress=progress)
    beside = out.resolve().parent
    links = {
        each.name: f"../{quote(each.name)}/{PAGE}"
        for each in checkpoints
        if to_html.files_of(beside / each.name / PAGE)
    }
    analysis, verdict = Analysis(compare, title="Settings and models"), found.verdict
    prompts = f"{n_prompts} prompts for each label and {5 * n_prompts} for each loss, seed {seed}."
    section = section_of("comparison", analysis, found, shown=[verdict], prompts=prompts)
    sections = [replace(section, links=links, longest_table=LONGEST_TABLE, unfolded=True)]
    if left_out:
        sections.append(_left_out(left_out))
        verdict += f" Left out: {len(left_out)} of {len(left_out) + len(checkpoints)}."
    return write_page(
        out,
        f"Comparison of {counted(len(checkpoints), 'model')}",
        ", ".join(each.name for each in checkpoints),
        verdict,
        sections,
        overwrite=overwrite,
        figures=figures,
    )


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of names, which puts s2 before s10.

    Example:
        >>> sorted(["s10", "s2", "s1"], key=natural)
        ['s1', 's2', 's10']
    """
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _left_out(reasons: Mapping[str, str]) -> Section:
    rows = [
        (printable(path), printable(reason).removeprefix(f"{printable(path)}: "))
        for path, reason in reasons.items()
    ]
    return Section(
        "Left out",
        "Asked for, and not in this comparison.",
        "Each file is read by itself; one that fails leaves the others as they are.",
        tables={"left_out": Table(pd.DataFrame(rows, columns=["checkpoint", "error"]))},
        longest_table=LONGEST_TABLE,
        unfolded=True,
    )
