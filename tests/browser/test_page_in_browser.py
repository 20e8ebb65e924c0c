"""The pages in a real browser: everything is drawn, the slider moves, nothing is asked of the network.

Needs playwright and a chromium, named by CHROMIUM; `make test-browser` installs both.
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
from tests.conftest import CHECKPOINTS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM")

pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="CHROMIUM names no browser; make test-browser does"
)

EVIL = "<img src=x onerror=alert(1)>"
READY = "body[data-drawn]"


@dataclass
class Opened:
    """A page that is open, with what it did that it should not."""

    page: "playwright.Page"
    complaints: list[str] = field(default_factory=list)

    def moved_to(self, name: str, position: int) -> None:
        """Move the sliders whose labels begin with a name, as a reader does."""
        for label in self.page.locator("label.slider", has_text=name).all():
            if label.is_visible():
                label.locator("input").fill(str(position))
        self.page.wait_for_timeout(300)

    def unfold(self, what: str) -> None:
        """Open the folds around what a selector finds, as a reader does."""
        for fold in self.page.locator(
            "details.more:not([open])", has=self.page.locator(what)
        ).all():
            fold.evaluate("fold => fold.open = true")
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
    """Reports on a model in a folder with a name that tries to be a tag, on linear attention, on both, on a deep one, and
    on two responses."""
    folder = tmp_path_factory.mktemp("reports")
    shutil.copytree(CHECKPOINTS / "softmax-h2-s0", folder / EVIL)
    models = {"evil": load(folder / EVIL), "linear": load(CHECKPOINTS / "linear-separate-s0")}
    files = {
        name: write_report(model, folder / name, n_prompts=128).page
        for name, model in models.items()
    }
    both = write_report(list(models.values()), folder / "both", n_prompts=128)
    deep = load(CHECKPOINTS / "sparse-h4-noise0.1-s0")
    several = write_report(deep, folder / "deep", n_prompts=256)
    tasks = write_report(load(CHECKPOINTS / "two-tasks-h4-s0"), folder / "tasks", n_prompts=128)
    return files | {"both": both.page, "deep": several.page, "tasks": tasks.page}


@pytest.fixture
def visit(browser: "playwright.Browser", pages: dict[str, Path]) -> Iterator[Visit]:
    """Opens a page by its name; it is closed when the test ends."""
    contexts = []

    def opened(name: str, *, width: int = 1200, scheme: str = "light") -> Opened:
        view = {"width": width, "height": 900}
        context = browser.new_context(viewport=view, color_scheme=scheme, has_touch=width < 500)
        contexts.append(context)
        found = Opened(context.new_page())
        complaints, page = found.complaints, found.page
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(pages[name].as_uri(), wait_until="commit")
        page.wait_for_selector(READY)
        # The page itself is all that is asked for.
        assert complaints == [pages[name].as_uri()]
        complaints.clear()
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
@pytest.mark.parametrize("name", ["evil", "linear", "both", "deep", "tasks"])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_window(
    visit: Visit, name: str, scheme: str, width: int
):
    at = visit(name, width=width, scheme=scheme)
    figures = at.page.locator(".figure")
    assert figures.count() == {"evil": 16, "linear": 22, "both": 2, "deep": 20, "tasks": 16}[name]
    for figure in figures.all():
        # A trace that plotly.js could not draw leaves no mark.
        assert figure.locator(".heatmaplayer image, .scatterlayer .trace, .barlayer .point").count()
    assert at.page.evaluate("document.documentElement.scrollWidth") <= width
    at.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    at.page.wait_for_timeout(500)
    assert at.page.evaluate("document.documentElement.scrollWidth") <= width
    # A figure that was drawn while it was folded away is as wide as its place.
    sizes = (
        "found => found.map(one => [one.clientWidth, one.querySelector('.main-svg').clientWidth])"
    )
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
    at = visit("linear")
    paint, drawn = at.page.evaluate(
        "[performance.getEntriesByName('first-contentful-paint')[0].startTime, performance.now()]"
    )
    assert paint < drawn / 2


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
    at.unfold("#figure-components_loss")
    section = at.page.locator("section", has=at.page.locator("#figure-components_loss"))
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

    def color() -> str:
        return at.page.locator("#figure-loss .xtick text").first.evaluate(
            "t => getComputedStyle(t).fill"
        )

    def ground() -> str:
        return at.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = color(), ground()
    at.page.emulate_media(color_scheme="dark")
    at.page.wait_for_timeout(1000)
    dark = color(), ground()
    brightness = [sum(map(int, text[4:-1].split(","))) for text in (*light, *dark)]
    assert brightness[0] < 400 < brightness[1]
    assert brightness[2] > 400 > brightness[3]


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
    assert risks["H0 H1"] in told
    assert kept == every
    box.get_by_label("head 1").uncheck()
    told, (_, kept, every, _) = shown()
    assert risks["H0"] in told
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


def test_rows_of_text_are_not_tall_on_a_narrow_page(visit: Visit):
    at = visit("evil", width=390)
    at.unfold(".table[aria-label=pattern]")
    heights = at.page.locator(".table[aria-label=pattern] tr").evaluate_all(
        "found => found.map(one => one.offsetHeight)"
    )
    assert max(heights) <= 60


def test_wide_tables_say_that_they_scroll(visit: Visit):
    at = visit("evil", width=400)
    at.unfold(".table[aria-label=pattern]")
    assert at.page.locator(".table.wide[aria-label=pattern] caption").count() == 1
    assert at.page.locator(".table:not(.wide) caption").count() > 0


def test_heatmaps_are_dark_at_zero_on_a_dark_page(visit: Visit):
    at = visit("evil")

    def ground() -> str:
        return at.page.evaluate(
            "document.getElementById('figure-circuits').data[0].colorscale.find(c => c[0] === 0.5)[1]"
        )

    def model() -> str:
        return at.page.evaluate(
            "document.getElementById('figure-fit_loss').data.find(t => t.meta).line.color"
        )

    light = ground(), model()
    at.page.emulate_media(color_scheme="dark")
    at.page.wait_for_timeout(500)
    assert (light, (ground(), model())) == (
        ("rgb(247,247,247)", "#1c1c1c"),
        ("#14171c", "#f1f3f5"),
    )


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
