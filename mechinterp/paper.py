"""Figures for a paper: a result's plot as PDF, SVG or PNG in the width of a column or a page."""

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go

COLUMN, PAGE = 3.3, 6.75
"""Inches: a column of a page of two, and the text of a page."""
FORMATS = (".pdf", ".svg", ".png")
FONT, FONT_POINTS = "Helvetica, Arial, Liberation Sans, sans-serif", 8
PIXELS = 96
"""Per inch, as browsers have it; 4/3 a point."""
DOTS = 300
"""Per inch of a PNG."""
USUAL_WIDTH = 640
"""Pixels for which the height of a figure is meant."""
LEAST_HEIGHT = 2.0


def save_figure(
    shown: object,
    path: str | Path,
    *,
    width: float = COLUMN,
    height: float | None = None,
    title: str = "",
) -> Path:
    """Write a figure, or a result's plot, for print: white ground, 8-point type, no slider and no title.

    Of a figure with a slider it is the frame that is shown. Fonts are embedded in a PDF, and named in an SVG.

    Args:
        shown: A plotly figure, or a result, whose `plot()` it is.
        path: Its ending says the format: .pdf, .svg or .png (300 dots per inch). What is there is replaced.
        width: Inches; 3.3 for a column, 6.75 for the width of a page.
        height: Inches; None: as the figure on the screen, in proportion.
        title: Above the figure; the caption says it, if left out.
    Returns:
        The path.
    Raises:
        ValueError: If the ending is another, a size is not above 0, or there is no figure, or kaleido or a browser for it is missing.
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
    """The file of a figure for print."""
    # Here and not above: it is an extra.
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
    """Figures in the width of a page by file name, drawn by one browser.

    Raises:
        ValueError: As `save_figure` does.
    """
    require_format(Path(f"{next(iter(shown), 'figure')}.{ending}"))
    import kaleido

    kaleido.start_sync_server(silence_warnings=True)
    try:
        with warnings.catch_warnings():
            # Plotly's own settings for a browser of its own.
            warnings.filterwarnings("ignore", message="The kopts argument is ignored")
            printed = {f"{n}.{ending}": for_print(each, width=PAGE) for n, each in shown.items()}
            return {file: _drawn(each, Path(file)) for file, each in printed.items()}
    finally:
        kaleido.stop_sync_server(silence_warnings=True)


def require_format(path: Path) -> None:
    """Refuse an ending of another format, and say which package is missing.

    Raises:
        ValueError: Naming it.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if find_spec("kaleido") is None:
        raise ValueError(
            f"{path}: figures in files need kaleido; pip install 'mechinterp-icl[figures]'."
        )


def for_print(
    shown: object, *, width: float = COLUMN, height: float | None = None, title: str = ""
) -> go.Figure:
    """A copy of the figure in the sizes of print.

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
