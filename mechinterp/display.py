"""Display of results in a notebook (sentence above table), helpers for tables, and counts in words."""

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

ROWS_SHOWN = 20
"""Number of rows of a table that are shown by default."""


class Result:
    """Result of an analysis: its repr is one sentence, `to_frame` a table, and a notebook shows both.

    Example:
        >>> class Answer(Result):
        ...     def __repr__(self):
        ...         return "Answer(6 * 7 = 42)"
        ...     def to_frame(self):
        ...         return pd.DataFrame({"answer": [42]})
        >>> Answer()._repr_html_()[:40]
        '<p><code>Answer(6 * 7 = 42)</code></p><d'
    """

    def to_frame(self) -> pd.DataFrame:
        """The result as a table."""
        raise NotImplementedError

    def save_figure(
        self, path: str | Path, *, width: float = 3.3, height: float | None = None, title: str = ""
    ) -> Path:
        """Write the figure for print as .pdf, .svg or .png; arguments and errors as in `mechinterp.save_figure`."""
        from mechinterp.paper import save_figure

        return save_figure(self, path, width=width, height=height, title=title)

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        table = frame.head(ROWS_SHOWN).to_html(index=False, border=0, float_format="%.4g")
        left = len(frame) - ROWS_SHOWN
        sentence = html.escape(repr(self)).replace("\n", "<br>")
        more = f"<p>and {left} more rows: .to_frame()</p>" if left > 0 else ""
        return f"<p><code>{sentence}</code></p><div style='overflow-x:auto'>{table}</div>{more}"


def counted(count: int, what: str) -> str:
    """Count and noun, with a plural s if needed.

    Example:
        >>> counted(1, "layer"), counted(4, "head")
        ('1 layer', '4 heads')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def frame_of(result: object, *names: str, **axes: Sequence | np.ndarray) -> pd.DataFrame:
    """Table with one row per index along some axes: the values of the axes, then fields and properties of a result.

    Args:
        names: Names of arrays; an array with fewer axes is repeated along the last ones.
        axes: Values along each axis, by column name; at least one axis.
    Example:
        >>> from types import SimpleNamespace
        >>> result = SimpleNamespace(loss=np.array([1.0, 2.0]), r2=np.array([[0.1, 0.2], [0.3, 0.4]]))
        >>> frame_of(result, "loss", "r2", step=[10, 20], head=range(2)).values.tolist()
        [[10.0, 0.0, 1.0, 0.1], [10.0, 1.0, 1.0, 0.2], [20.0, 0.0, 2.0, 0.3], [20.0, 1.0, 2.0, 0.4]]
    """
    shape = tuple(map(len, axes.values()))
    places = np.indices(shape).reshape(len(shape), -1)
    columns = {
        name: np.asarray(values)[at]
        for (name, values), at in zip(axes.items(), places, strict=True)
    }
    for name in names:
        values = np.asarray(getattr(result, name))
        values = values.reshape(values.shape + (1,) * (len(shape) - values.ndim))
        columns[name] = np.broadcast_to(values, shape).ravel()
    return pd.DataFrame(columns)


def head_axes(values: np.ndarray) -> dict[str, range]:
    """Axes of an array [layer, head], by name.

    Example:
        >>> head_axes(np.zeros((2, 4)))
        {'layer': range(0, 2), 'head': range(0, 4)}
    """
    return {"layer": range(values.shape[0]), "head": range(values.shape[1])}


def head_names(shape: Sequence[int]) -> list[str]:
    """Names of the heads of an array [layer, head], in its order.

    Example:
        >>> head_names((1, 2))
        ['L0H0', 'L0H1']
    """
    return [f"L{layer}H{head}" for layer, head in np.ndindex(*shape)]


def with_sem(*names: str) -> tuple[str, ...]:
    """Each name followed by the name of its standard error.

    Example:
        >>> with_sem("risk", "ratio")
        ('risk', 'risk_sem', 'ratio', 'ratio_sem')
    """
    return tuple(each for name in names for each in (name, f"{name}_sem"))
