"""Several methods side by side: their mean scores, and their differences on the same entries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.result import Table
from mechinterp.display import Result
from mechinterp.known.scores import MEANINGS
from mechinterp.known.submissions import Submission, read_submission

RESERVED = ("score", "entries")
"""Columns of the table of means that are no method."""
FEW = 3
"""Largest number of methods whose differences are shown in a terminal without --wide."""
LEAST_FILES = 2
"""Smallest number of methods to compare."""
AREAS = ("edges cpr", "edges cmd")
"""Scores without bounds."""
MOST_BARS, ROW = 3, 22
"""Largest number of methods that are drawn as bars; height of a row of the matrix, in pixels."""


@dataclass(frozen=True, eq=False, repr=False)
class MethodComparison(Result):
    """Scores of several methods on the entries of one suite."""

    submissions: tuple[Submission, ...]
    names: tuple[str, ...]
    """Name of each method; where two share a name, with its file."""
    COLUMNS: ClassVar = {
        "score": "Name of the score; docs/known_answers.md explains each.",
        "entries": "Number of entries on which all methods of the row have the score.",
        "first": "Method that is compared.",
        "second": "Method with which it is compared.",
        "difference": "Mean over entries of the first method's score minus the second's, each on the same entry.",
        "difference_sem": "Standard error of difference over entries.",
        "better": "Number of entries on which the first method is closer to the best value of the score.",
        "tied": "Number of entries on which both are equally close.",
        "meaning": "Meaning of the score.",
        "best": "Best value of the score.",
        "random": "Value of the score for a random order; empty where it depends on the entry.",
    }

    def __repr__(self) -> str:
        return f"MethodComparison({self.sentences()[0].removesuffix('.')})"

    def sentences(self) -> list[str]:
        """The methods and the suite, and how to read the tables."""
        one = self.submissions[0]
        return [
            f"{', '.join(self.names)} on version {one.version} of the suite, sha256 {one.sha256[:12]}.",
            "A mean is over the entries on which all methods of its row have the score. Differences are paired: both "
            "methods on the same entry. Standard errors are over entries; variants of one model count as entries of their own.",
        ]

    @property
    def scores(self) -> dict[str, pd.DataFrame]:
        """Scores of each kind by method: one row per entry, NaN where a method has none; without methods that have the
        score on no entry."""
        parts = [
            each.rows.assign(method=name)
            for each, name in zip(self.submissions, self.names, strict=True)
        ]
        rows = pd.concat(parts, ignore_index=True)
        wide = {
            score: part.pivot(index="entry", columns="method", values="value")
            for score, part in rows.groupby("score", sort=False)
        }
        return {
            score: wide[score][[name for name in self.names if name in wide[score]]]
            for score in MEANINGS
            if score in wide
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per score: the mean of each method over common entries and its standard error."""
        rows = []
        for score, wide in self.scores.items():
            common = wide.dropna()
            row: dict[str, object] = {"score": score}
            for name in wide:
                row |= {name: common[name].mean(), f"{name}_sem": common[name].sem()}
            rows.append(row | {"entries": len(common)})
        scored = [name for name in self.names if any(name in row for row in rows)]
        columns = [each for name in scored for each in (name, f"{name}_sem")]
        return pd.DataFrame(rows, columns=["score", *columns, "entries"])

    def differences(self) -> pd.DataFrame:
        """One row per score and pair of methods, paired over entries."""
        columns = ["score", "first", "second", "difference", "difference_sem", "better", "tied"]
        return pd.DataFrame(self._pairs(), columns=[*columns, "entries"])

    def _pairs(self) -> Iterator[tuple[object, ...]]:
        for score, wide in self.scores.items():
            best = MEANINGS[score][1]
            for first, second in combinations(wide, 2):
                both = wide[[first, second]].dropna()
                # The size of a signed error counts.
                sizes = both.abs() if best == 0 else both
                moved, nearer = sizes[first] - sizes[second], (sizes - best).abs()
                better = int((nearer[first] < nearer[second]).sum())
                tied = int((nearer[first] == nearer[second]).sum())
                yield score, first, second, moved.mean(), moved.sem(), better, tied, len(both)

    def meanings(self) -> pd.DataFrame:
        """One row per score: its meaning, its best value, and that of a random order."""
        rows = [(name, *MEANINGS[name]) for name in self.scores]
        return pd.DataFrame(rows, columns=["score", "meaning", "best", "random"])

    def tables(self) -> dict[str, Table]:
        """Means, paired differences, and the meaning of each score."""
        return {
            "means": Table(self.to_frame(), "Means"),
            "differences": Table(
                self.differences(), "Differences", brief=len(self.submissions) <= FEW
            ),
            "meanings": Table(self.meanings(), "Scores", brief=False),
        }

    def plot(self) -> go.Figure:
        """Mean of each score over common entries: bars with standard errors, or a matrix for more than `MOST_BARS` methods.

        Areas that have no bounds are left out.
        """
        frame = self.to_frame()
        frame = frame[~frame["score"].isin(AREAS)]
        names, scores = [name for name in self.names if name in frame], frame["score"].tolist()
        title = "Scores of each method"
        if len(names) > MOST_BARS:
            return _matrix(frame[names].to_numpy(float).T, names, scores, title)
        bars = {n: (frame[n].to_numpy(), frame[f"{n}_sem"].fillna(0).to_numpy()) for n in names}
        return figures.bars(scores, bars, title=title, y_title="mean score")


def _matrix(
    means: Float[np.ndarray, "method score"], names: list[str], scores: list[str], title: str
) -> go.Figure:
    """Means as colours from -1 (orange) over 0 (white) to 1 (blue), each with its number."""
    figure = go.Figure(
        go.Heatmap(
            z=means,
            x=scores,
            y=names,
            zmin=-1,
            zmax=1,
            colorscale=[[0, figures.COLORS[1]], [0.5, "white"], [1, figures.COLORS[0]]],
            text=np.where(np.isnan(means), "", np.char.mod("%.2f", means)),
            texttemplate="%{text}",
            textfont_size=9,
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(tickangle=-60)
    return figures.finish(figure, title, height=ROW * len(names) + 220)


def compare_submissions(paths: Sequence[str | Path]) -> MethodComparison:
    """Methods of several files side by side, paired over entries.

    Args:
        paths: Files that `mechinterp score --out` wrote, and folders of such files.
    Raises:
        CheckpointError: If a file is something else.
        ValueError: If a folder has no .json file, there are fewer than two files, or their suites differ.
    Example:
        >>> import tempfile
        >>> from mechinterp.known import Submission, score, suite
        >>> entries = suite(1, trained="none")
        >>> def by_output(entry):
        ...     return {"heads": entry.checkpoint.weights.W_O.square().sum((-2, -1)).numpy()}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("one", "other"):
        ...         found = Submission.of(score(by_output, entries), entries, method=name)
        ...         _ = found.save(f"{folder}/{name}.json")
        ...     compare_submissions([folder]).differences()["difference"].max()
        np.float64(0.0)
    """
    files = [file for path in paths for file in _files_of(Path(path))]
    if len(files) < LEAST_FILES:
        raise ValueError(
            f"a comparison needs at least {LEAST_FILES} files of `mechinterp score --out`, got {len(files)}."
        )
    read = {file: read_submission(file) for file in files}
    first, one = next(iter(read.items()))
    for file, other in read.items():
        if other.sha256 != one.sha256:
            raise ValueError(
                f"{file}: is of version {other.version} of the suite, but {first} is of version {one.version}."
            )
    return MethodComparison(tuple(read.values()), tuple(_names(read)))


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise ValueError(f"{path}: has no .json file.")
    return files


def _names(read: dict[Path, Submission]) -> Iterator[str]:
    """Name of each method; with the file where the name says too little."""
    methods = [each.method for each in read.values()]
    for file, method in zip(read, methods, strict=True):
        unclear = methods.count(method) > 1 or method in RESERVED or method.endswith("_sem")
        yield f"{method} ({file})" if unclear else method
