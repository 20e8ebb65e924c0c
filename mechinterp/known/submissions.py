"""Submissions: the scores of one method as a file that others can read, with the suite and the versions behind them."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechinterp.checkpoints.io.files import CheckpointError, readable, write_new, writing
from mechinterp.display import Result
from mechinterp.known.entries import HASHES, Suite, documents_of
from mechinterp.known.scores import MEANINGS, Scores
from mechinterp.version import __version__

SUBMISSION_VERSION = 1
"""Version of the format of the file."""
LARGEST = 20_000_000
"""Largest size of a submission that is read, in bytes."""
LONGEST_NAME = 200
"""Largest number of characters of a name in a file."""
SUBMISSION_COLUMNS = ["entry", "kind", "score", "value"]
"""Columns of the scores."""
DIGITS = 6
"""Number of digits of a score in a file, so that scores which differ by rounding are tied."""
PACKAGES = ("numpy", "torch")
"""Packages whose versions are noted, besides this one and that of the method."""
WRONG = "no submission of `mechinterp score --out`"


@dataclass(frozen=True, eq=False, repr=False)
class Submission(Result):
    """Scores of one method on a suite, and with which packages they were computed."""

    method: str
    version: int
    """Version of the suite."""
    sha256: str
    """Hash of the suite."""
    versions: Mapping[str, str]
    """Version of Python and of each package, by name."""
    rows: pd.DataFrame
    """One row per entry and score: entry, kind, score, value."""
    seconds: Mapping[str, float]
    """Processor time of the method on each entry, in seconds."""

    @classmethod
    def of(cls, found: Scores, entries: Suite, *, method: str | None = None) -> "Submission":
        """Submission of scores.

        Args:
            entries: The suite that was scored.
            method: Name of the method, such as "module:function"; None: that of the scores.
        Example:
            >>> from mechinterp.known import score, suite
            >>> entries = suite(1, trained="none")
            >>> Submission.of(score(lambda entry: {}, entries), entries, method="mine:nothing")
            Submission(mine:nothing on 31 entries of the suite, version 1)
        """
        name = found.method if method is None else method
        return cls(
            name, entries.version, entries.hash, versions(name), found.to_frame(), found.seconds
        )

    def __repr__(self) -> str:
        return f"Submission({self.method} on {len(self.seconds)} entries of the suite, version {self.version})"

    def to_frame(self) -> pd.DataFrame:
        """One row per entry and score."""
        return self.rows.copy()

    def plot(self) -> go.Figure:
        """Mean of each score over entries, with its standard error."""
        return Scores(self.method, self.rows, self.seconds).plot()

    def to_document(self) -> dict[str, Any]:
        """The JSON document of the file: scores by entry, with kind and seconds."""
        scores: dict[str, dict[str, float | None]] = {name: {} for name in self.seconds}
        for row in self.rows.itertuples(index=False):
            scores[row.entry][row.score] = _rounded(row.value) if isfinite(row.value) else None
        kinds = dict(zip(self.rows["entry"], self.rows["kind"], strict=True))
        return {
            "submission_version": SUBMISSION_VERSION,
            "method": self.method,
            "suite": {"version": self.version, "sha256": self.sha256},
            "versions": dict(self.versions),
            "entries": {
                name: {"kind": kinds.get(name, "")}
                | {"seconds": _rounded(seconds), "scores": scores[name]}
                for name, seconds in self.seconds.items()
            },
        }

    def save(self, file: str | Path) -> Path:
        """Write the submission as a new JSON file.

        Raises:
            CheckpointError: If the name does not end in .json, the file exists, or it cannot be written.
        """
        file = Path(file)
        require_new_file(file)
        text = json.dumps(self.to_document(), indent=1, allow_nan=False)
        with writing(file):
            write_new(file, partial(Path.write_text, data=f"{text}\n", encoding="utf-8"))
        return file


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def require_new_file(file: Path) -> None:
    """Refuse a file for a submission that exists, or does not end in .json.

    Raises:
        CheckpointError: In these cases.
    """
    if file.suffix != ".json":
        raise CheckpointError(f"{file}: must end in .json.")
    require_absent(file)


def require_absent(path: Path) -> None:
    """Refuse a path at which there is something.

    Raises:
        CheckpointError: In this case.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path}: already exists; it is not overwritten.")


def versions(method: str) -> dict[str, str]:
    """Versions of Python, of this package, and of the package of a method "module:function" if it is an installed one.

    Example:
        >>> list(versions("mine:method"))
        ['python', 'mechinterp', 'numpy', 'torch']
    """
    found = {"python": platform.python_version(), "mechinterp": __version__}
    found |= {name: metadata.version(name) for name in PACKAGES}
    owners = metadata.packages_distributions().get(method.partition(":")[0].partition(".")[0], ())
    return found | {name: metadata.version(name) for name in owners if name not in found}


def read_submission(file: str | Path) -> Submission:
    """Submission in a file that `Submission.save` or `mechinterp score --out` wrote.

    Raises:
        CheckpointError: If the file is something else, or of a suite that this version of the package lacks.
    Example:
        >>> import tempfile
        >>> from mechinterp.known import score, suite
        >>> entries = suite(1, trained="none")
        >>> own = Submission.of(score(lambda entry: {}, entries), entries, method="mine:nothing")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_submission(own.save(f"{folder}/mine.json"))
        Submission(mine:nothing on 31 entries of the suite, version 1)
    """
    file = Path(file)
    with readable(file, "JSON", LARGEST, ValueError):
        document = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    try:
        return _submission_from(document)
    except _WrongError as error:
        raise CheckpointError(f"{file}: {WRONG} ({error}).") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


class _WrongError(ValueError):
    """A document that is no submission, with the reason."""


def _submission_from(document: Any) -> Submission:
    method = _text(_part(document, "method"), "method")
    form, about = _part(document, "submission_version"), _part(document, "suite")
    _require(form == SUBMISSION_VERSION, f"submission_version must be 1, got {form!r:.40}")
    version, sha256 = _part(about, "version"), _text(_part(about, "sha256"), "sha256")
    if not isinstance(version, int) or version not in HASHES:
        raise ValueError(
            f"is of version {version!r:.40} of the suite; this package has version {', '.join(map(str, HASHES))}."
        )
    if sha256 != HASHES[version]:
        raise ValueError(
            f"is of another suite: the hash of version {version} is {HASHES[version][:12]}..., got {sha256[:12]}...."
        )
    packages, rows, seconds = _part(document, "versions"), [], {}
    _require(isinstance(packages, dict), "versions must be an object")
    known = documents_of(version)
    for name, entry in _items(_part(document, "entries"), "entries"):
        _require(name in known, f"there is no entry {name!r:.40}")
        seconds[name] = _number(_part(entry, "seconds"), f"seconds of {name}")
        kind = _text(_part(entry, "kind"), f"kind of {name}")
        for score, value in _items(_part(entry, "scores"), f"scores of {name}"):
            _require(score in MEANINGS, f"there is no score {score!r:.40}")
            if value is not None:
                rows.append((name, kind, score, _number(value, f"{score} of {name}")))
    texts = {_text(name, "package"): _text(each, name) for name, each in packages.items()}
    return Submission(
        method, version, sha256, texts, pd.DataFrame(rows, columns=SUBMISSION_COLUMNS), seconds
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise _WrongError(rule)


def _part(document: Any, name: str) -> Any:
    _require(isinstance(document, dict) and name in document, f"it has no {name}")
    return document[name]


def _items(document: Any, name: str) -> list[tuple[str, Any]]:
    _require(isinstance(document, dict), f"{name:.60} must be an object")
    return [(_text(key, name), value) for key, value in document.items()]


def _text(value: Any, name: str) -> str:
    _require(isinstance(value, str) and len(value) <= LONGEST_NAME, f"{name:.60} must be a text")
    return value


def _number(value: Any, name: str) -> float:
    holds = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    _require(holds, f"{name:.60} must be a number, got {value!r:.40}")
    return float(value)
