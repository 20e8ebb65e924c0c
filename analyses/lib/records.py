"""The record of a claim: what a paper says, what was measured, and the verdict that follows from
the two.

The script F/S.py writes its records into results/F_S.records.json, with where they come from: the script,
the package's version and commit, the checkpoints' ids and seeds, and the sha256 of the script's CSV
files and of the records themselves. The tables of the pages are made from these files
(`lib/pages.py`).
"""

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

Bound = float | tuple[float, float] | None

# A value holds if `RELATIONS[relation](value, bound)`.
RELATIONS = {
    "at most": operator.le,
    "below": operator.lt,
    "at least": operator.ge,
    "above": operator.gt,
    "equal to": operator.eq,
    "between": lambda value, bound: bound[0] <= value <= bound[1],
}
PREFIXES = ("softmax-", "linear-", "sparse-")
TAGS = ("paper", "second hand", "ours")
# Every claim of the three papers has one record or more: its id, or its id and a suffix.
CLAIMS = (
    *(f"softmax-{name}" for name in ("O1a", "O1b", "O1c", "O1d", "O1e", "O2a", "O2b", "O2c")),
    *(
        f"softmax-{name}"
        for name in ("O3a", "O3b", "O3c", "O3d", "O3e", "O4a", "O4b", "O4c", "O4d")
    ),
    *(f"softmax-{name}" for name in ("S1", "L1", "A1", "A2", "N1", "N2", "N3")),
    *(f"softmax-{name}" for name in ("M-I", "M-II", "M-III", "M-IV", "M-loss")),
    *(f"softmax-T{number}" for number in range(1, 8)),
    *(f"linear-{number}" for number in range(1, 21)),
    *(f"sparse-C{number}" for number in range(1, 17)),
)


def rounded(value: float) -> float:
    """Six digits, as in the CSV files."""
    return float(f"{value:.6g}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One claim, or one clause of a claim, with what was measured."""

    id: str
    """The claim's id and, for a clause, a suffix: softmax-O1a-diagonal."""
    statement: str
    quantity: str = ""
    """What `values` are, with their unit."""
    relation: str
    """A key of RELATIONS."""
    bound: Bound = None
    """What each value is compared with; two numbers for "between"."""
    tag: str = "paper"
    """Who says so: the paper, a second hand's account of it, or ours."""
    paper: str = ""
    """The paper's own number, where it has one."""
    models: str = ""
    """Checkpoints, or "closed form"."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by model. Empty if the claim was not tested."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard errors of those values that have one."""
    margin: float = 0
    """By how many of its standard errors a value must hold."""
    over: Mapping[str, int | str] = field(default_factory=dict)
    """What the standard errors are over: prompts, seeds, and how models or heads were selected."""
    text: str = ""
    """What was measured in words, where `values` do not say it."""
    note: str = ""
    """What the verdict has to be read with, such as fewer seeds than asked."""

    def __post_init__(self) -> None:
        for name in ("values", "errors"):
            pairs = getattr(self, name).items()
            object.__setattr__(self, name, {key: rounded(value) for key, value in pairs})
        if isinstance(self.bound, list | tuple):
            object.__setattr__(self, "bound", tuple(map(rounded, self.bound)))
        if not self.id.startswith(PREFIXES):
            raise ValueError(f"id must start with one of {', '.join(PREFIXES)}, got {self.id}.")
        if self.relation not in RELATIONS:
            raise ValueError(
                f"relation must be one of {', '.join(RELATIONS)}, got {self.relation}."
            )
        if self.tag not in TAGS:
            raise ValueError(f"tag must be one of {', '.join(TAGS)}, got {self.tag}.")
        if not set(self.errors) <= set(self.values):
            raise ValueError(f"errors of {self.id} must belong to its values.")

    @property
    def n(self) -> int:
        """Number of models measured."""
        return len(self.values)

    @property
    def holding(self) -> list[str]:
        """Models that the claim holds for, by its margin. What is not a number holds for none."""
        holds = RELATIONS[self.relation]
        return [
            name
            for name, value in self.values.items()
            if all(
                holds(value + side * self.margin * self.errors.get(name, 0.0), self.bound)
                for side in (-1, 1)
            )
        ]

    @property
    def verdict(self) -> str:
        """ "holds", "holds for k of n", "does not hold" or "not tested"."""
        count = len(self.holding)
        if not self.n:
            return "not tested"
        if count == self.n:
            return "holds"
        return f"holds for {count} of {self.n}" if count else "does not hold"

    @property
    def asked(self) -> str:
        """The relation and its bound, as text."""
        ends = self.bound if isinstance(self.bound, tuple) else (self.bound,)
        asked = f"{self.relation} {' and '.join(f'{end:g}' for end in ends)}"
        return f"{asked} by {self.margin:g} s.e." if self.margin else asked

    @property
    def judged(self) -> str:
        """The verdict with its note."""
        return f"{self.verdict} ({self.note})" if self.note else self.verdict

    @property
    def measured(self) -> str:
        """The range of the values with their largest standard error, as text."""
        if self.text or not self.n:
            return self.text
        if set(self.values.values()) <= {0.0, 1.0} and self.relation == "equal to":
            return f"{len(self.holding)} of {self.n}"
        low, high = (f"{end(self.values.values()):.4g}" for end in (min, max))
        span = low if low == high else f"{low} to {high}"
        return f"{span} ± {max(self.errors.values()):.1g}" if self.errors else span

    def to_json(self) -> dict:
        """The fields, and what follows from them."""
        derived = {"n": self.n, "n_hold": len(self.holding), "verdict": self.verdict}
        return asdict(self) | derived


def with_errors(pairs: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Values and standard errors of a record.

    Example:
        >>> with_errors({"s0": (0.5, 0.01)})
        {'values': {'s0': 0.5}, 'errors': {'s0': 0.01}}
    """
    values = {name: float(value) for name, (value, _) in pairs.items()}
    return {"values": values, "errors": {name: float(error) for name, (_, error) in pairs.items()}}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(records: Iterable[dict]) -> str:
    """The sha256 of records, so that a digit changed by hand is seen."""
    return digest(json.dumps(list(records), sort_keys=True).encode())


def save(folder: Path, name: str, records: Iterable[Record], provenance: Mapping) -> None:
    """Write the records of a script beside its CSV files, whose digests go with them.

    Args:
        name: Of the results: softmax_patterns for softmax/patterns.py.
    """
    found = [record.to_json() for record in records]
    files = sorted(file for file in folder.glob("*.csv") if written_by(file.name) == name)
    sums = {file.name: digest(file.read_bytes()) for file in files}
    script = {"script": script_of(name)}
    content = script | {**provenance, "files": sums, "seal": seal(found), "records": found}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{name}.records.json").write_text(text, encoding="utf-8")


def script_of(name: str) -> str:
    """The script whose results have a name, without its ending.

    Example:
        >>> script_of("softmax_figure_1_two_heads")
        'softmax/figure_1_two_heads'
    """
    return name if name == "learning_coefficient" else name.replace("_", "/", 1)


def written_by(file: str) -> str:
    """The name of the results that a CSV file is of: its own, but where a script writes several."""
    name = file.removesuffix(".csv")
    several = {
        "softmax_emergence_seeds": "softmax_emergence",
        "sparse_settings_training": "sparse_settings",
        "calibration_labels": "calibration_errors",
        "calibration_thresholds": "calibration_errors",
    }
    return several.get(name, name)


def load(file: Path) -> list[Record]:
    """The records of a file."""
    names = Record.__dataclass_fields__
    content = json.loads(file.read_text(encoding="utf-8"))
    return [Record(**{name: row[name] for name in names}) for row in content["records"]]


def all_records(folder: Path) -> list[tuple[str, Record]]:
    """Every script, without its ending, with its records, in the order of the scripts' names."""
    suffix = ".records.json"
    files = sorted(folder.glob(f"*{suffix}"))
    return [
        (script_of(file.name.removesuffix(suffix)), one) for file in files for one in load(file)
    ]


def agree(stored: Record, again: Record, *, z: float = 4) -> bool:
    """Whether two measurements of a record agree within their standard errors.

    Numbers without a standard error are determined by the weights: they agree to the rounding of
    float32 sums and of integration, or to a thousandth of what they are asked to be within.
    """
    if not stored.n:
        return stored.verdict == again.verdict
    if stored.values.keys() != again.values.keys():
        return False
    ends = stored.bound if isinstance(stored.bound, tuple) else (stored.bound,)
    slack = 1e-3 * max(abs(end) for end in ends)
    for name, value in stored.values.items():
        error = math.hypot(stored.errors.get(name, 0), again.errors.get(name, 0))
        allowed = max(z * error + 1e-4 * max(abs(value), 1e-3), slack)
        if abs(again.values[name] - value) > allowed:
            return False
    return True
