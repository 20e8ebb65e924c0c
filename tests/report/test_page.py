"""The page is one file that says what it found, opens offline and trusts no name it is given."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mechinterp.analysis.fits import fit_learners
from mechinterp.analysis.patterns import classify
from mechinterp.checkpoints.native import Checkpoint, load, save
from mechinterp.config import ExperimentConfig, override
from mechinterp.models.constructions import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.functional import AttentionWeights
from mechinterp.report.page import LONGEST_TABLE, PAGE, Result, write_report
from mechinterp.training.sweep import train_models

N_PROMPTS = 128
EVIL = "<img src=x onerror=alert(1)>"
BALANCE = "the mu no longer sum to zero"
VOID = {"meta", "link", "img", "br", "hr", "input", "base"}


@dataclass
class Page(HTMLParser):
    """What a browser would find: tags, ids, links, scripts, and the text outside of scripts and styles."""

    source: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_data(self, data: str):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def attributes(self, name: str) -> list[str]:
        return [value for _, given in self.tags if (value := given.get(name)) is not None]

    @property
    def figures(self) -> list[str]:
        return [
            given["id"]
            for _, given in self.tags
            if "plotly-graph-div" in (given.get("class") or "") and given.get("id")
        ]

    @property
    def headings(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self.source)


def write(folder: Path, name: str, weights: AttentionWeights) -> tuple[Checkpoint, Page]:
    """A checkpoint of hand-built weights, without history, and its page in `folder`/report."""
    config = override(ExperimentConfig(), f"model.n_heads={weights.n_heads}")
    save(folder / name, config, weights, step=0)
    checkpoint = load(folder / name)
    written = write_report(checkpoint, folder / "report", n_prompts=N_PROMPTS)
    return checkpoint, Page(written.page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """A shortly trained model with a history, and the folder of its report."""
    folder = tmp_path_factory.mktemp("trained")
    config = override(
        ExperimentConfig(),
        *("seed=1", "train.steps=60", "train.log_every=20", "train.n_eval_prompts=512"),
    )
    train_models({".": config}, folder / "model")
    checkpoint = load(folder / "model")
    write_report(checkpoint, folder / "report", n_prompts=N_PROMPTS)
    return checkpoint, folder / "report"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Page]:
    """A gradient step in two heads, in a folder with a name that tries to be a tag."""
    weights = debiased_gradient_step(0.88, 0.02, d_x=5)
    return write(tmp_path_factory.mktemp("pair"), EVIL, weights)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Page]:
    return write(tmp_path_factory.mktemp("single"), "one", kernel_head(0.5, 1.5, d_x=5))


@pytest.fixture(scope="module")
def page(trained: tuple[Checkpoint, Path]) -> Page:
    return Page((trained[1] / PAGE).read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(page: Page, trained: tuple[Checkpoint, Path]):
    assert [name for name in ("src", "srcset", "action", "data") if page.attributes(name)] == []
    outside = [
        link for link in page.attributes("href") if not re.fullmatch(r"#[\w-]+|\w+\.csv", link)
    ]
    assert outside == []
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert "@import" not in page.source.partition("</style>")[0]
    libraries = [script for script in page.scripts if len(script) > 1_000_000]
    assert len(libraries) == 1
    assert "plotly.js v" in libraries[0]
    assert (trained[1] / PAGE).stat().st_size < 6_000_000
    assert page.open == []


def test_every_figure_is_drawn(page: Page):
    assert page.figures == [
        *("figure-heads", "figure-qk", "figure-ov", "figure-ablation", "figure-shapley"),
        *("figure-fit_loss", "figure-fit_distance", "figure-omega", "figure-mu", "figure-loss"),
    ]
    small = [script for script in page.scripts if len(script) < 1_000_000]
    drawn = re.findall(r'Plotly\.newPlot\(\s*"([^"]+)"', "".join(small))
    assert drawn == page.figures
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))


def test_every_linked_table_can_be_read(page: Page, trained: tuple[Checkpoint, Path]):
    _, folder = trained
    links = [link for link in page.attributes("href") if link.endswith(".csv")]
    assert sorted(links) == sorted(file.name for file in folder.glob("*.csv"))
    tables = {link: pd.read_csv(folder / link) for link in links}
    for link, table in tables.items():
        assert len(table) > 0
        assert f"{link} ({len(table)} rows)" in page.text
    assert list(tables["ablation.csv"]["method"]) == ["zero", "zero", "mean", "mean"]
    assert list(tables["subsets.csv"]["kept"]) == ["none", "H0", "H1", "H0 H1"]
    assert tables["history.csv"]["step"].max() == 60
    assert len(tables["fits.csv"]) > LONGEST_TABLE
    assert "<caption>fits</caption>" not in page.source
    assert "<caption>fits_at_trained_length</caption>" in page.source


def test_tables_hold_the_numbers_of_the_analyses(trained: tuple[Checkpoint, Path]):
    checkpoint, folder = trained
    found = classify(checkpoint, n_prompts=N_PROMPTS).to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(folder / "heads.csv"), found)
    fits = fit_learners(checkpoint, n_prompts=5 * N_PROMPTS).to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(folder / "fits.csv"), fits)


def test_sections_and_their_links(page: Page, single: tuple[Checkpoint, Page]):
    names = ["Heads and pattern", "Circuits", "Head ablation", "Which learner", "Training"]
    assert page.headings == names
    anchors = [link for link in page.attributes("href") if link.startswith("#")]
    assert anchors == [f"#section-{i}" for i in range(1, 6)]
    assert set(anchors) <= {f"#{name}" for name in page.attributes("id")}
    assert page.text.count("How this was computed:") == 5
    assert "60 steps; final loss on 512 fixed prompts" in page.text
    # A checkpoint without a history has no section about its training.
    assert single[1].headings == names[:-1]
    assert "Training" not in single[1].text


def test_the_verdict_is_on_the_page_and_names_model_pattern_and_learner(tmp_path: Path):
    checkpoint, page = write(tmp_path, "step", debiased_gradient_step(0.88, 0.02, d_x=5))
    written = write_report(checkpoint, tmp_path / "again", n_prompts=N_PROMPTS)
    assert written.page == tmp_path / "again" / PAGE
    assert all(table.exists() for table in written.tables)
    assert written.verdict in page.text
    assert written.verdict.startswith("step implements one step of debiased gradient descent (")
    assert "Closest to debiased_gd, eta = 0.88" in written.verdict
    # The best step for this task, 1 / (1 + 1.1 * 5 / 40).
    assert "The best debiased step size for this task is 0.8791." in page.text


def test_the_balance_of_a_pair_is_explained_where_there_is_a_pair(
    pair: tuple[Checkpoint, Page], single: tuple[Checkpoint, Page]
):
    assert BALANCE in pair[1].text
    assert BALANCE not in single[1].text
    assert "is a kernel smoother (" in single[1].text


def test_a_name_is_never_a_tag(pair: tuple[Checkpoint, Page]):
    checkpoint, page = pair
    assert checkpoint.name == EVIL
    assert EVIL not in page.source
    assert "onerror" not in [name for _, given in page.tags for name in given]
    # Title, heading and verdict.
    assert page.text.count(EVIL) == 3
    assert page.source.count("&lt;img src=x onerror=alert(1)&gt;") == 3


def test_a_number_that_is_none_is_a_dash(tmp_path: Path):
    checkpoint, page = write(tmp_path, "zero", zero_head(d_x=5))
    found = classify(checkpoint, n_prompts=N_PROMPTS)
    assert np.isnan(
        [
            found.scales.omega_spread,
            found.scales.zero_sum,
            found.scales.gamma,
            found.substitution.r2,
        ]
    ).all()
    cells = re.findall(r"<td>(.*?)</td>", page.source)
    assert cells[cells.index("omega_spread") + 1] == "–"
    assert cells[cells.index("R² of the closed form") + 1] == "– ± –"
    assert "nan" not in " ".join(cells).lower().split()
    assert "undetermined: no head is active" in page.text


def test_the_first_row_of_a_history_has_no_training_loss(page: Page):
    table = page.source.partition("<caption>history</caption>")[2]
    head = re.findall(r'<th scope="col">(.*?)</th>', table)
    first = re.findall(r"<td>(.*?)</td>", table)[: len(head)]
    row = dict(zip(head, first, strict=True))
    assert (row["step"], row["loss"]) == ("0", "–")
    assert re.fullmatch(r"\d\.\d+", row["eval_loss"])


def test_a_report_is_not_overwritten_unless_asked(tmp_path: Path):
    checkpoint, _ = write(tmp_path, "one", kernel_head(0.5, 1.5, d_x=5))
    for file in (tmp_path / "report").iterdir():
        file.write_text("mine")
    with pytest.raises(ValueError, match="already exists and is not overwritten") as error:
        write_report(checkpoint, tmp_path / "report", n_prompts=N_PROMPTS)
    assert str(error.value).startswith(str(tmp_path / "report"))
    assert {file.read_text() for file in (tmp_path / "report").iterdir()} == {"mine"}
    written = write_report(
        checkpoint, str(tmp_path / "report"), n_prompts=N_PROMPTS, overwrite=True
    )
    assert "mine" not in {file.read_text() for file in (tmp_path / "report").iterdir()}
    assert written.page.stat().st_size > 1_000_000


def test_a_folder_with_other_things_and_a_file_are_no_place_for_a_report(
    single: tuple[Checkpoint, Page], tmp_path: Path
):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="already exists and is not overwritten"):
        write_report(single[0], tmp_path, n_prompts=N_PROMPTS)
    with pytest.raises(ValueError, match="already exists and is not overwritten"):
        write_report(single[0], tmp_path / "notes.txt", n_prompts=N_PROMPTS, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_every_analysis_gives_a_table_and_a_figure(single: tuple[Checkpoint, Page]):
    assert isinstance(classify(single[0], n_prompts=N_PROMPTS), Result)
    assert isinstance(fit_learners(single[0], n_prompts=N_PROMPTS, context_lengths=[40]), Result)
