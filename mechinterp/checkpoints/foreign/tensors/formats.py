"""Known formats of external files: rows of `formats.toml`, and the tasks of their training."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TASK = {"beta_var": 1.0, "query_noise": False}

NO_VALUE = {"scale": "default", "output_column": "default", "norm": "none", "normalization": "none"}
"""Texts that stand for None, which TOML does not have."""


TASKS: dict[str, Callable[[int, int, str], dict[str, object]]] = {
    # The softmax paper, for several responses.
    "several": lambda d_x, d_y, score: (
        {"context_length": 8 * d_x, **TASK, "noise_var": 0.4} if d_y > 1 else {}
    ),
    # The linear-attention paper.
    "eigenvalues": lambda d_x, d_y, score: (
        {
            "context_length": 31,
            **TASK,
            "noise_var": 0.0,
            "covariance": {"kind": "eigenvalues", "eigenvalues": [1 / d_x] * d_x},
        }
        if score in ("linear", "linear/L")
        else {}
    ),
    # The code of Garg et al.
    "points": lambda d_x, d_y, score: {"context_length": 2 * d_x, **TASK, "noise_var": 0.0},
    # The code of Ahn et al.
    "twenty_pairs": lambda d_x, d_y, score: {"context_length": 20, **TASK, "noise_var": 0.0},
}
"""Tasks by the names that rows have for them: functions of d_x, d_y and the score."""


@dataclass(frozen=True)
class Format:
    """Known properties of the files whose tensors have these names."""

    name: str
    """Name that answers show; several rows may share one."""
    marks: tuple[tuple[str, ...], ...] = ()
    """Sets of names; a file with all names of one set, after a prefix that ends in a dot, has this
    format."""
    attention_alone: bool = False
    """True: a file of this format holds nothing but attention."""
    only_stated: bool = False
    """True: other files have the same names, so the format must be stated (--format)."""
    patterns: tuple[str, ...] = ()
    """For formats without `marks`: patterns, each of which must match at least one name."""
    identified_by: str = ""
    """For formats without `marks`: the tensors that identify it, in words."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Values of choices that the format's code fixes, by name; a scale of None is 1/sqrt(d_head).
    """
    assumed: Mapping[str, object] = field(default_factory=dict)
    """Values of choices that are assumed without trying others, by name."""
    turns: bool = False
    """True: rotary positions are possible and tried, as a file has no trace of them."""
    wide_heads: bool = False
    """True: queries of each head have the width of a token, which gives the number of heads."""
    tries: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values to try, by name, in an order other than that for unknown layers."""
    task: Callable[[int, int, str], dict[str, object]] | None = None
    """Fields of the task to assume, by d_x, d_y and score; None: the task of the softmax paper."""
    beside: Mapping[str, object] = field(default_factory=dict)
    """Further assumptions, by the name under which they are shown."""

    @classmethod
    def of_row(cls, key: str, row: Mapping) -> "Format":
        """Format of a row of the table, with the row's key as its name if the row has none."""
        fields = {"name": key, **row}
        fields["marks"] = tuple(map(tuple, row.get("marks", ())))
        fields["patterns"] = tuple(row.get("patterns", ()))
        fields["tries"] = {name: tuple(values) for name, values in row.get("tries", {}).items()}
        fields["task"] = TASKS.get(row.get("task", ""))
        for part in ("fixed", "assumed", "beside"):
            values = row.get(part, {}).items()
            fields[part] = {n: None if NO_VALUE.get(n) == value else value for n, value in values}
        return cls(**fields)


_FORMATS = {
    key: Format.of_row(key, row)
    for key, row in tomllib.loads(
        Path(__file__).with_name("formats.toml").read_text("utf-8")
    ).items()
}
"""Rows by key, in the order in which a file is compared with them."""
OWN_LAYERS, BARE, LAYERED = (_FORMATS[key] for key in ("own-layers", "bare", "named-layers"))
HOOKED, PRODUCTS = _FORMATS["transformer-lens"], _FORMATS["linear-transformer"]
ONE_MATRIX = _FORMATS["one-matrix"]
BY_NAMES = [row for row in _FORMATS.values() if row.marks or row.patterns]
"""Rows that the names in a file may show."""
NAMED = tuple(dict.fromkeys(row.name for row in BY_NAMES))
"""Formats of external files."""
