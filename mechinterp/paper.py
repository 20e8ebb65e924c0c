"""Figures for print: a result's plot as PDF, SVG or PNG, as wide as a column or a page."""

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go

COLUMN, PAGE = 3.3, 6.75
"""Widths in inches: a column of a two-column page, and the text of a page."""
FIGURE_FORMATS = (".pdf", ".svg", ".png")
FONT, FONT_POINTS = "Helvetica, Arial, Liberation Sans, sans-serif", 8
PIXELS = 96
"""Pixels per inch, as in browsers; 4/3 per point."""
DOTS = 300
"""Resolution of a PNG in dots per inch."""
USUAL_WIDTH = 640
"""Screen width in pixels that the height of a figure refers to."""
LEAST_HEIGHT = 2.0


def save_figure(
    shown: object,
    path: str | Path,
    *,
    width: float = COLUMN,
    height: float | None = None,
    title: str = "",
) -> Path:
    """Write a figure, or a result's plot, for print: white background, 8-point type, no slider and no title.

    If the figure has a slider, the frame shown is written. Fonts are embedded in a PDF, and named in an SVG.

    Args:
        shown: A plotly figure, or a result with a method `plot()`.
        path: File to write; its ending gives the format: .pdf, .svg or .png (300 dots per inch). Overwrites.
        width: Width in inches; 3.3 for a column, 6.75 for a page.
        height: Height in inches; None: in proportion to the figure on the screen.
        title: Title above the figure; empty: none, since a caption serves as one.
    Returns:
        The path.
    Raises:
        ValueError: If the ending is unknown, a size is not above 0, there is no figure, or kaleido or a browser
            is missing.
    See also:
        `write_report`.
    Example:
        >>> save_figure(go.Figure(), "figure.doc")
        Traceback (most recent call last):
        ...
        ValueError: figure.doc: must end in .pdf, .svg or .png.
    """
    path = Path(path)
    require_format(path)
    for name, inches in (("width", width), ("height", height)):
        if inches is not None and not inches > 0:
            raise ValueError(f"{name} must be > 0 inches, got {inches}.")
    path.write_bytes(_drawn(for_print(shown, width=width, height=height, title=title), path))
    return path


def _drawn(figure: go.Figure, path: Path) -> bytes:
    """Image file of a figure for print, as bytes."""
    # Imported here, because kaleido is an optional dependency.
    from kaleido.errors import ChromeNotFoundError

    try:
        scale = DOTS / PIXELS if path.suffix == ".png" else 1
        return figure.to_image(format=path.suffix[1:], scale=scale)
    except (ChromeNotFoundError, RuntimeError) as error:
        if "Chrome" not in str(error):
            raise
        raise ValueError(
            f"{path}: kaleido needs Chrome or Chromium to draw: install one, or run kaleido_get_chrome."
        ) from None


def all_drawn(shown: Mapping[str, go.Figure], ending: str) -> dict[str, bytes]:
    """Figures as wide as a page, by file name, drawn by one browser.

    Raises:
        ValueError: As in `save_figure`.
    """
    require_format(Path(f"{next(iter(shown), 'figure')}.{ending}"))
    import kaleido

    kaleido.start_sync_server(silence_warnings=True)
    try:
        with warnings.catch_warnings():
            # Plotly passes settings for a browser of its own.
            warnings.filterwarnings("ignore", message="The kopts argument is ignored")
            printed = {f"{n}.{ending}": for_print(each, width=PAGE) for n, each in shown.items()}
            return {file: _drawn(each, Path(file)) for file, each in printed.items()}
    finally:
        kaleido.stop_sync_server(silence_warnings=True)


def require_format(path: Path) -> None:
    """Refuse an unknown file ending, and report a missing package.

    Raises:
        ValueError: If the ending is unknown or kaleido is not installed.
    """
    if path.suffix not in FIGURE_FORMATS:
        raise ValueError(
            f"{path}: must end in {', '.join(FIGURE_FORMATS[:-1])} or {FIGURE_FORMATS[-1]}."
        )
    if find_spec("kaleido") is None:
        raise ValueError(
            f"{path}: figures in files need kaleido; pip install 'mechinterp-icl[figures]'."
        )


def for_print(
    shown: object, *, width: float = COLUMN, height: float | None = None, title: str = ""
) -> go.Figure:
    """Copy of the figure in print size.

    Example:
        >>> for_print(go.Figure(layout={"height": 320}), width=6.75).layout.width
        648
    """
    if not isinstance(shown, go.Figure) and not hasattr(shown, "plot"):
        raise ValueError(f"A figure or a result with a plot is needed, got {type(shown).__name__}.")
    screen = shown if isinstance(shown, go.Figure) else shown.plot()
    figure = go.Figure(screen.to_dict())
    figure.frames, figure.layout.sliders, figure.layout.updatemenus = (), (), ()
    pixels = round(width * PIXELS)
    shrunk = (screen.layout.height or USUAL_WIDTH * 0.6) * pixels / USUAL_WIDTH
    inches = max(shrunk / PIXELS, LEAST_HEIGHT) if height is None else height
    size = FONT_POINTS * PIXELS / 72
    font = {"family": FONT, "size": size, "color": "black"}
    top = 2.5 * size if title or screen.layout.annotations else 8
    bar = {"thickness": 8, "nticks": 5, "tickfont": font, "title": {"font": font}}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": font}
    figure.update_layout(
        template="plotly_white",
        width=pixels,
        height=round(inches * PIXELS),
        title={"text": title, "font": font},
        font=font,
        legend=legend,
        margin={"l": 8, "r": 8, "t": top, "b": 4.5 * size},
    )
    axis = {"title_standoff": 4, "tickfont": font, "title_font": font, "automargin": True}
    figure.update_xaxes(axis)
    figure.update_yaxes(axis)
    figure.update_annotations(font=font)
    figure.update_traces(colorbar=bar, selector={"type": "heatmap"})
    thin = {"line": {"width": 1.5}, "marker": {"size": 4}, "textfont": font}
    figure.update_traces(thin, selector={"type": "scatter"})
    return figure
