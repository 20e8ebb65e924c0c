"""Display of a result in a notebook, its sentence above its table, and numbers of things in words."""

import html
from pathlib import Path

import pandas as pd

ROWS = 20


class Result:
    """What an analysis found: one sentence as its repr, a table, and in a notebook both.

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
        """Write the figure for print, .pdf, .svg or .png; arguments and errors are those of `mechinterp.save_figure`."""
        from mechinterp.paper import save_figure

        return save_figure(self, path, width=width, height=height, title=title)

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        table = frame.head(ROWS).to_html(index=False, border=0, float_format="%.4g")
        left = len(frame) - ROWS
        said = html.escape(repr(self)).replace("\n", "<br>")
        more = f"<p>and {left} more rows: .to_frame()</p>" if left > 0 else ""
        return f"<p><code>{said}</code></p><div style='overflow-x:auto'>{table}</div>{more}"


def counted(count: int, what: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "layer"), counted(4, "head")
        ('1 layer', '4 heads')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"
