"""What a reader knows of somebody else's checkpoint and its file cannot say."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Hints:
    """Arguments of `load`; None where the reader leaves it to the file, or to a stated assumption."""

    task: Mapping[str, object] | None = None
    """Fields of TaskConfig."""
    format: str | None = None
    """One of `FORMATS`, for a file that more than one of them fits."""
    d_x: int | None = None
    d_y: int | None = None
    n_heads: int | None = None
    scale: float | None = None
    """Factor on the scores."""
    attend_to_self: bool | None = None
    """Whether the query is among its own keys."""

    def __post_init__(self) -> None:
        for name in ("d_x", "d_y", "n_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}.")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be a positive number, got {self.scale}.")

    @property
    def given(self) -> dict[str, object]:
        """Those that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
