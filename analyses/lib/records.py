"""Claims from analyses/claims/*.toml, and records: measured values that decide the verdicts.

The script F/S.py writes its records to results/F_S.records.json: ids and measured values, without
statements and bounds. The file also has their origin: script, version and commit of the package,
ids and seeds of the checkpoints, and the sha256 of the script's CSV files and of the records.
`pages.py` makes all tables from these files."""

import hashlib
import json
import math
import operator
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Bound = float | tuple[float, float]
Values = Mapping[str, float | tuple[float, float]]
"""Measured values by model, each with its standard error if it has one."""

# A value holds if `RELATIONS[relation](value, bound)`.
RELATIONS = {
    "at most": operator.le,
    "below": operator.lt,
    "at least": operator.ge,
    "above": operator.gt,
    "equal to": operator.eq,
    "between": lambda value, bound: bound[0] <= value <= bound[1],
}
SAID_BY, BOUND_BY = ("paper", "second hand", "ours"), ("paper", "ours")
CLAIMS = Path(__file__).parents[1] / "claims"
PAPERS = ("softmax", "linear", "sparse")


def rounded(value: float) -> float:
    """The value rounded to six digits, as in the CSV files."""
    return float(f"{value:.6g}")


def span(values: Iterable[float], show: str) -> str:
    """A range of numbers as text.

    Example:
        >>> span([0.1302, 0.1291], ".3f")
        '0.129 to 0.130'
    """
    ordered = sorted(values)
    low, high = (f"{end:{show}}" for end in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim, or one clause of a claim."""

    id: str
    """Id of the claim; a clause adds a suffix: softmax-O1a-diagonal."""
    statement: str
    quantity: str = ""
    """Measured quantity, with its unit."""
    relation: str
    """A key of RELATIONS."""
    bound: Bound
    """Number that each value is compared with; two numbers for "between"."""
    margin: float = 0
    """Number of standard errors by which a value must hold."""
    said_by: str
    """Source of the claim: the paper, an account of the paper by others ("second hand"), or this
    project."""
    where: str = ""
    """Section, equation, figure or table of the paper, if known."""
    bound_by: str
    """Source of the bound: the paper, or this project."""
    changed: tuple[Mapping[str, str], ...] = ()
    """Changes after a measurement: `when`, the old value (`was`), the new one (`now`), and `why`.
    """
    paper: str = ""
    """The paper's own number, if it has one."""
    models: str = ""
    """Names of checkpoints, or "closed form"."""

    def __post_init__(self) -> None:
        if isinstance(self.bound, list | tuple):
            object.__setattr__(self, "bound", tuple(map(rounded, self.bound)))
        if self.relation not in RELATIONS:
            raise ValueError(
                f"relation must be one of {', '.join(RELATIONS)}, got {self.relation}."
            )
        for name, known in (("said_by", SAID_BY), ("bound_by", BOUND_BY)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)}."
                )
        object.__setattr__(self, "changed", tuple(self.changed))
        for change in self.changed:
            if set(change) != {"when", "was", "now", "why"}:
                raise ValueError(
                    f"changed of {self.id} must have when, was, now, why; got {', '.join(change)}."
                )

    def holds(self, value: float, error: float = 0.0) -> bool:
        """True if a value satisfies the relation by the margin; False for NaN."""
        compare = RELATIONS[self.relation]
        return all(compare(value + side * self.margin * error, self.bound) for side in (-1, 1))

    @property
    def criterion(self) -> str:
        """The relation and its bound, as text."""
        ends = self.bound if isinstance(self.bound, tuple) else (self.bound,)
        text = f"{self.relation} {' and '.join(f'{end:g}' for end in ends)}"
        return f"{text} by {self.margin:g} s.e." if self.margin else text

    @property
    def source(self) -> str:
        """Source of the claim, and its place in the paper, as text."""
        return f"{self.said_by}, {self.where}" if self.where else self.said_by

    @property
    def moves(self) -> str:
        """Changes after a measurement, as text."""
        return "; ".join("{when}: {was} -> {now} ({why})".format(**one) for one in self.changed)


@dataclass(frozen=True, kw_only=True)
class Record(Claim):
    """A claim with its measured values."""

    values: Mapping[str, float] = field(default_factory=dict)
    """Measured values by model; empty if the claim was not tested."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard errors of the values that have one."""
    over: Mapping[str, int | str] = field(default_factory=dict)
    """Source of the standard errors: prompts, seeds, and how models or heads were selected.
    `failed` is the number of failed trainings, which have no value."""
    text: str = ""
    """Result in words, if `values` do not show it."""
    note: str = ""
    """Remark on the verdict, such as too few seeds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("values", "errors"):
            pairs = getattr(self, name).items()
            object.__setattr__(self, name, {key: rounded(value) for key, value in pairs})
        if not set(self.errors) <= set(self.values):
            raise ValueError(f"errors of {self.id} must belong to its values.")

    @property
    def n(self) -> int:
        """Number of models measured."""
        return len(self.values)

    @property
    def holding(self) -> list[str]:
        """Models for which the claim holds."""
        errors = self.errors
        return [name for name, one in self.values.items() if self.holds(one, errors.get(name, 0.0))]

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
    def judged(self) -> str:
        """The verdict with its note and the number of failed trainings."""
        notes = [self.note] if self.note else []
        notes += [f"{self.over['failed']} trainings failed"] if "failed" in self.over else []
        return f"{self.verdict} ({', '.join(notes)})" if notes else self.verdict

    @property
    def measured(self) -> str:
        """The range of the values with their largest standard error, as text."""
        if self.text or not self.n:
            return self.text
        if set(self.values.values()) <= {0.0, 1.0} and self.relation == "equal to":
            return f"{len(self.holding)} of {self.n}"
        ends = span(self.values.values(), ".4g")
        return f"{ends} ± {max(self.errors.values()):.1g}" if self.errors else ends

    def to_json(self) -> dict:
        """Measured values with the id of the claim; the claim itself is in analyses/claims."""
        return {name: getattr(self, name) for name in ("id", *MEASURED)}


MEASURED = tuple(name for name in Record.__annotations__)


@cache
def claims() -> dict[str, Claim]:
    """All claims by id, in the order of the files."""
    found = {}
    for paper in PAPERS:
        rows = tomllib.loads((CLAIMS / f"{paper}.toml").read_text(encoding="utf-8"))
        for id, row in rows.items():
            if not id.startswith(f"{paper}-"):
                raise ValueError(f"ids of {paper}.toml must start with {paper}-, got {id}.")
            found[id] = Claim(id=id, models=row.pop("setting", ""), **row)
    return found


def record(
    id: str,
    values: Values,
    *,
    errors: Mapping[str, float] | None = None,
    over: Mapping[str, int | str] | None = None,
    text: str = "",
    note: str = "",
) -> Record:
    """Record of the claim with this id.

    Args:
        values: A number, or a pair of a number and its standard error, by model.
        errors: Standard errors of values that are single numbers.
    """
    pairs = {name: one for name, one in values.items() if isinstance(one, tuple)}
    found = {name: error for name, (_, error) in pairs.items()}
    found |= {} if errors is None else dict(errors)
    plain = {name: pairs.get(name, (one,))[0] for name, one in values.items()}
    return Record(
        **vars(claims()[id]),
        values={name: float(value) for name, value in plain.items()},
        errors={name: float(error) for name, error in found.items()},
        over=over or {},
        text=text,
        note=note,
    )


def records(prefix: str, measured: Mapping[str, Values], **about) -> list[Record]:
    """Records of several claims, by their ids without the prefix; `about` has the arguments of
    `record`."""
    return [record(f"{prefix}{name}", values, **about) for name, values in measured.items()]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(records: Iterable[dict]) -> str:
    """The sha256 of records, so that a digit changed by hand is noticed."""
    return digest(json.dumps(list(records), sort_keys=True).encode())


def save(folder: Path, name: str, records: Iterable[Record], provenance: Mapping) -> None:
    """Write the records of a script, with the digests of its CSV files.

    Args:
        name: Name of the results: softmax_patterns for softmax/patterns.py.
    """
    found = [record.to_json() for record in records]
    files = sorted(file for file in folder.glob("*.csv") if written_by(file.name) == name)
    sums = {file.name: digest(file.read_bytes()) for file in files}
    script = {"script": script_of(name)}
    content = script | {**provenance, "files": sums, "seal": seal(found), "records": found}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{name}.records.json").write_text(text, encoding="utf-8")


def script_of(name: str) -> str:
    """Script that wrote results of this name, without its ending.

    Example:
        >>> script_of("softmax_patterns")
        'softmax/patterns'
    """
    in_folder = (CLAIMS.parent / name.partition("_")[0]).is_dir()
    return name.replace("_", "/", 1) if in_folder else name


def written_by(file: str) -> str:
    """Name of the results that a CSV file belongs to: its own name, unless a script writes several
    files."""
    name = file.removesuffix(".csv")
    several = {
        "softmax_emergence_seeds": "softmax_emergence",
        "sparse_settings_training": "sparse_settings",
        "sparse_start_expected": "sparse_start",
        "calibration_fresh_errors": "calibration_fresh",
        "calibration_fresh_models": "calibration_fresh",
        "calibration_second_errors": "calibration_fresh",
        "calibration_second_models": "calibration_fresh",
        "calibration_labels": "calibration_errors",
        "calibration_models": "calibration_errors",
        "calibration_thresholds": "calibration_errors",
    }
    return several.get(name, name)


def load(file: Path) -> list[Record]:
    """Records of a file, each with its claim."""
    rows = json.loads(file.read_text(encoding="utf-8"))["records"]
    return [record(row["id"], **{name: row[name] for name in MEASURED}) for row in rows]


def all_records(folder: Path) -> list[tuple[str, Record]]:
    """Records with their script (without ending), in the order of the scripts' names."""
    suffix = ".records.json"
    files = sorted(folder.glob(f"*{suffix}"))
    return [
        (script_of(file.name.removesuffix(suffix)), one) for file in files for one in load(file)
    ]


def agree(stored: Record, again: Record, *, z: float = 4) -> bool:
    """True if two measurements of a record agree within their standard errors.

    Numbers without a standard error are determined by the weights. They must agree to the rounding
    of float32 sums and of integration, or to a thousandth of their bound.
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
