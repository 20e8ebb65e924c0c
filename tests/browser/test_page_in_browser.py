"""The pages in a real browser: everything is drawn, the slider moves, nothing is asked of the network.

Needs playwright and a chromium, named by CHROMIUM; `make test-browser` installs both. Drawing a page takes seconds, so that
each is opened once and all tests use it.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mechinterp.checkpoints.checkpoint import load
from mechinterp.report.page import write_report
from mechinterp.report.sections import default_names
from tests.conftest import CHECKPOINTS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM")

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="CHROMIUM names no browser; make test-browser does"
)

EVIL = "<img src=x onerror=alert(1)>"
READY = "body[data-drawn]"
NARROW = {"width": 400, "scheme": "dark"}
FIGURES = {"evil": 18, "linear": 21, "both": 2, "deep": 23, "tasks": 18}
"""Number of figures of each page."""
STEP_BY_STEP = ("classify-over-steps", "circuits-over-steps")


@dataclass
class Opened:
    """An open page, and the messages and requests that it should not make."""

    page: "playwright.Page"
    complaints: list[str] = field(default_factory=list)
    seconds: tuple[float, float] = (0.0, 0.0)
    """From the start until text was seen, and until everything was drawn."""

    def shown(self, *, width: int = 1200, scheme: str = "light") -> "Opened":
        """The same page on a screen of this width in these colours, with all folds closed."""
        self.complaints.clear()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme, media="screen")
        self.page.evaluate(
            "document.querySelectorAll('details').forEach(one => { one.open = false; })"
        )
        self.page.wait_for_timeout(500)
        return self

    def moved_to(self, name: str, position: int) -> None:
        """Move the sliders whose labels begin with a name, as a reader does."""
        for label in self.page.locator("label.slider", has_text=name).all():
            if label.is_visible():
                label.locator("input").fill(str(position))
        self.page.wait_for_timeout(300)

    def unfold(self, what: str) -> None:
        """Open the folds around what a selector finds, as a reader does."""
        folds = self.page.locator("details.more:not([open])", has=self.page.locator(what))
        while folds.count():
            folds.first.evaluate("fold => fold.open = true")
        self.page.wait_for_timeout(300)


Visit = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports on a model in a folder with a name that tries to be a tag, on linear attention, on both, on several layers,
    and on two responses."""
    folder = tmp_path_factory.mktemp("reports")
    shutil.copytree(CHECKPOINTS / "softmax-h2-s0", folder / EVIL)
    evil, linear = load(folder / EVIL), load(CHECKPOINTS / "linear-separate-s0")
    # Heads and circuits step by step take long for linear attention; the first report has both.
    names = [name for name in default_names(linear) if name not in STEP_BY_STEP]
    written = {
        "evil": write_report(evil, folder / "evil", n_prompts=128),
        "linear": write_report(linear, folder / "linear", n_prompts=512, analyses=names),
        "both": write_report([evil, linear], folder / "both", n_prompts=128),
    }
    for name, model in (("deep", "sparse-h4-noise0.1-s0"), ("tasks", "two-tasks-h4-s0")):
        written[name] = write_report(load(CHECKPOINTS / model), folder / name, n_prompts=128)
    return {name: report.page for name, report in written.items()}


@pytest.fixture(scope="module")
def visit(browser: "playwright.Browser", pages: dict[str, Path]) -> Visit:
    """Opens a page by its name, at the first visit, and shows it as if it had just been opened."""
    there: dict[str, Opened] = {}

    def visited(name: str, *, width: int = 1200, scheme: str = "light") -> Opened:
        if name not in there:
            view = {"width": width, "height": 900}
            context = browser.new_context(viewport=view, color_scheme=scheme, has_touch=width < 500)
            there[name] = opened(context.new_page(), pages[name].as_uri())
        return there[name].shown(width=width, scheme=scheme)

    return visited


def opened(page: "playwright.Page", address: str) -> Opened:
    """The page at an address, when all its figures are drawn; it asks for itself and for nothing else."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(address, wait_until="commit")
    page.wait_for_selector(READY)
    assert complaints == [address]
    seconds = page.evaluate(
        "[performance.getEntriesByName('first-contentful-paint')[0].startTime, performance.now()]"
    )
    return Opened(page, complaints, tuple(seconds))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_window(visit: Visit, name: str):
    """A wide light screen and a narrow dark one; two pages are opened on the wide one, three on the narrow one."""
    wide = {"width": 1200, "scheme": "light"}
    screens = (wide, NARROW) if name in ("evil", "linear") else (NARROW, wide)
    for screen in screens:
        at, width = visit(name, **screen), screen["width"]
        figures = at.page.locator(".figure")
        assert figures.count() == FIGURES[name]
        for figure in figures.all():
            # A trace that plotly.js could not draw leaves no mark.
            marks = ".heatmaplayer image, .scatterlayer .trace, .barlayer .point"
            assert figure.locator(marks).count()
        assert at.page.evaluate("document.documentElement.scrollWidth") <= width
        at.page.evaluate(
            "document.querySelectorAll('details').forEach(one => { one.open = true; })"
        )
        at.page.wait_for_timeout(500)
        assert at.page.evaluate("document.documentElement.scrollWidth") <= width
        # A figure that was drawn while it was folded away is as wide as its place.
        sizes = "found => found.map(one => [one.clientWidth, one.querySelector('.main-svg').clientWidth])"
        for place, drawn in figures.evaluate_all(sizes):
            assert abs(place - drawn) <= 1
        assert at.complaints == []


@pytest.mark.parametrize("width", [1200, 400])
def test_the_buttons_of_a_figure_lie_above_the_names_of_its_heads(visit: Visit, width: int):
    at = visit("evil", width=width)
    figure = at.page.locator("#figure-circuits")
    figure.hover()
    buttons = figure.locator(".modebar").bounding_box()
    names = [name.bounding_box() for name in figure.locator(".annotation-text").all()]
    assert len(names) == 4  # QK and OV of two heads
    assert all(buttons["y"] + buttons["height"] <= name["y"] for name in names)


def test_text_is_seen_before_figures(visit: Visit):
    text, figures = visit("linear").seconds
    assert text < figures / 2


def test_the_slider_moves_the_heatmaps_and_their_titles(visit: Visit):
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    at = visit("evil")
    at.unfold("#figure-circuits_over_steps")
    at.unfold("#figure-classify_loss")
    steps = list(checkpoint.snapshots)
    before = at.page.locator("#figure-circuits_over_steps image").first.get_attribute("href")
    at.moved_to("step", 1)
    after = at.page.locator("#figure-circuits_over_steps image").first.get_attribute("href")
    assert before != after
    expected = checkpoint.snapshots[steps[1]].QK[0, :5].numpy()
    assert (
        f"QK and OV circuits at step {steps[1]:,}"
        in at.page.locator("figcaption").all_inner_texts()
    )
    assert at.page.locator("label.slider output").last.inner_text() == f"{steps[1]:,}"
    shown = at.page.evaluate(
        "document.getElementById('figure-circuits_over_steps').calcdata[0][0].z.map(row => Array.from(row))"
    )
    # Heatmaps are drawn with six decimals.
    np.testing.assert_allclose(shown, expected.round(6), rtol=0, atol=1e-8)
    mark = at.page.evaluate("document.getElementById('figure-classify_loss').data[1].x[0]")
    assert mark == steps[1]
    assert at.complaints == []


def test_the_slider_of_linear_attention_tells_the_algorithm(visit: Visit):
    at = visit("linear", width=400)
    at.unfold("#figure-linear_components_loss")
    section = at.page.locator("section", has=at.page.locator("#figure-linear_components_loss"))
    slider = section.locator("label.slider", has_text="step").locator("input")
    slider.focus()
    at.page.keyboard.press("Home")
    at.page.wait_for_timeout(300)
    captions = at.page.locator("figcaption")
    assert any("none of 4 components learned" in text for text in captions.all_inner_texts())
    for _ in range(2):
        at.page.keyboard.press("ArrowRight")
    at.page.wait_for_timeout(300)
    # Row 5 of 101 is the third of 40 that are drawn, 200 steps apart.
    shown = [text for text in captions.all_inner_texts() if text.startswith("Step 1,000: ")]
    assert len(shown) == 1
    assert shown[0].endswith("principal component regression on 1 of 4 components")
    assert slider.get_attribute("aria-valuetext") == "1,000"
    assert at.complaints == []


def test_figures_follow_the_colours_of_the_page(visit: Visit):
    at = visit("evil")

    def brightness(colour: str) -> int:
        return sum(map(int, colour[4:-1].split(",")))

    def text_and_ground() -> tuple[int, int]:
        text = at.page.locator("#figure-loss .xtick text").first
        ground = at.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return brightness(text.evaluate("t => getComputedStyle(t).fill")), brightness(ground)

    def zero_and_model() -> tuple[str, str]:
        """The colour of a heatmap at zero, and that of the model's curve."""
        scale = "document.getElementById('figure-circuits').data[0].colorscale"
        curve = "document.getElementById('figure-learner_loss').data.find(t => t.meta).line.color"
        return at.page.evaluate(f"{scale}.find(c => c[0] === 0.5)[1]"), at.page.evaluate(curve)

    text, ground = text_and_ground()
    assert text < 400 < ground
    assert zero_and_model() == ("rgb(247,247,247)", "#1c1c1c")
    at.shown(scheme="dark")
    text, ground = text_and_ground()
    assert text > 400 > ground
    assert zero_and_model() == ("#14171c", "#f1f3f5")


def test_heads_are_switched_off_by_the_reader(visit: Visit):
    at = visit("evil")
    at.unfold(".table[aria-label=subsets]")
    box = at.page.locator(".toggles")
    subsets = at.page.locator(".table[aria-label=subsets]")
    rows = [row.inner_text().split("\t") for row in subsets.locator("tbody tr").all()]
    risks = {row[0]: row[2] for row in rows}

    def shown() -> tuple[str, list[float]]:
        cells = box.locator("tbody tr").first.locator("td").all_inner_texts()
        return box.locator("output").inner_text(), [float(text) for text in cells]

    told, (_, kept, every, _) = shown()
    assert risks["L0H0 L0H1"] in told
    assert kept == every
    box.get_by_label("head 1").uncheck()
    told, (_, kept, every, _) = shown()
    assert risks["L0H0"] in told
    assert kept != every
    box.get_by_label("head 0").uncheck()
    told, (_, kept, _, _) = shown()
    assert (risks["none"] in told, kept) == (True, 0)
    assert at.complaints == []


def test_on_paper_everything_is_unfolded_and_nothing_is_cut(visit: Visit, pages: dict[str, Path]):
    at = visit("evil")
    at.page.set_viewport_size({"width": 700, "height": 900})
    at.page.emulate_media(media="print")
    at.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    at.page.wait_for_timeout(500)
    assert at.page.locator("details:not([open])").count() == 0
    assert at.page.evaluate("document.documentElement.scrollWidth") <= 700
    wide = "found => found.filter(one => one.scrollWidth > one.clientWidth + 1).length"
    assert at.page.locator("figure, .table").evaluate_all(wide) == 0
    # Columns stand below each other rather than that a number is broken.
    heads = at.page.locator(".table[aria-label=heads] table")
    assert heads.count() > 1
    titles = heads.locator("th:visible").all_text_contents()
    assert sorted(set(titles)) == sorted(pd.read_csv(pages["evil"].parent / "heads.csv").columns)
    assert titles.count("head") == heads.count()
    lines = "found => found.map(one => { const r = document.createRange(); r.selectNodeContents(one); return r.getClientRects().length; })"
    assert set(heads.locator("td:visible").evaluate_all(lines)) == {1}
    at.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert at.page.locator("details[open]").count() == 0
    assert heads.count() == 1
    assert at.page.locator("[hidden]").count() == 0


def test_tables_on_a_narrow_page_have_low_rows_and_say_that_they_scroll(visit: Visit):
    at = visit("evil", width=390)
    at.unfold(".table[aria-label=pattern]")
    heights = at.page.locator(".table[aria-label=pattern] tr").evaluate_all(
        "found => found.map(one => one.offsetHeight)"
    )
    assert max(heights) <= 60
    assert at.page.locator(".table.wide[aria-label=pattern] caption").count() == 1
    assert at.page.locator(".table:not(.wide) caption").count() > 0


def test_tables_are_sorted_by_a_click_or_by_the_keyboard(visit: Visit):
    at = visit("linear")
    at.unfold("table:has-text('omega_mean')")
    table = at.page.locator("table", has_text="omega_mean").first
    names = table.locator("th").all_inner_texts()
    column = names.index("omega_mean")

    def values() -> list[float]:
        return [
            float(row.locator("td").nth(column).inner_text())
            for row in table.locator("tbody tr").all()
        ]

    before = values()
    assert before != sorted(before)
    button = table.locator("th button").nth(column)
    button.click()
    assert values() == sorted(before)
    button.press("Enter")
    assert values() == sorted(before, reverse=True)
    assert table.locator("th").nth(column).get_attribute("aria-sort") == "descending"


def test_a_name_that_tries_to_be_a_tag_does_no_harm(visit: Visit):
    for name, heading in (("evil", EVIL), ("both", "Comparison of 2 models")):
        at = visit(name)
        assert at.page.locator("h1").inner_text() == heading
        assert EVIL in at.page.locator("header").inner_text()
        assert at.page.locator("img").count() == 0
        assert at.complaints == []
