"""The page is one file that says what it found, opens offline and trusts no name it is given: for one model of one layer or of
several, ours or somebody else's, and for several models.
"""

import html
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.learners.compare import compare_learners
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.display import counted
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step, zero_head
from mechinterp.models.heads import head_outputs
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.weights import Weights
from mechinterp.report.page import PAGE_FILE, Report, write_report
from mechinterp.report.sections import default_names
from mechinterp.report.to_html import PAPERS, Section
from mechinterp.training.train import train_models
from tests.checkpoints.files import loaded
from tests.conftest import CHECKPOINTS, Run
from tests.deep_models import wide_checkpoint
from tests.models.test_layered_models import garg

pytestmark = pytest.mark.slow
N_PROMPTS = 128
EVIL = "<img src=x onerror=alert(1)>"
VOID = {"meta", "link", "img", "br", "hr", "input", "base", "wbr"}


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
            self.text += data.replace("\N{NO-BREAK SPACE}", " ")

    def attributes(self, name: str) -> list[str]:
        return [value for _, given in self.tags if (value := given.get(name)) is not None]

    @property
    def figures(self) -> list[str]:
        drawn = (given for _, given in self.tags if given.get("class") == "figure")
        return [given["id"] for given in drawn if given.get("id")]

    @property
    def drawn(self) -> list[dict]:
        """What plotly.js is to draw in each figure."""
        kinds = [given.get("type") for tag, given in self.tags if tag == "script"]
        pairs = zip(kinds, self.scripts, strict=True)
        texts = [script for kind, script in pairs if kind == "application/json"]
        *figures, looks = [json.loads(text) for text in texts]
        assert set(looks) == {"templates", "scales"}
        return figures

    def rows(self, name: str) -> list[dict[str, str]]:
        """Cells of the table of this name, by column."""
        table = self.source.partition(f'aria-label="{name}"')[2].partition("</table>")[0]
        columns = re.findall(r'<button type="button">(.*?)</button>', table.replace("<wbr>", ""))
        cells = re.findall(r"<td.*?>(.*?)</td>", table)
        starts = range(0, len(cells), len(columns))
        return [dict(zip(columns, cells[i : i + len(columns)], strict=True)) for i in starts]

    @property
    def headings(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self.source)


def write(folder: Path, name: str, weights: Weights, **asked: list[str]) -> tuple[Checkpoint, Page]:
    """A checkpoint of hand-built weights, without history, and its page in `folder`/report."""
    config = override(ExperimentConfig(), f"model.n_heads={weights.n_heads}")
    save(folder / name, config, weights, step=0)
    checkpoint = load(folder / name)
    written = write_report(checkpoint, folder / "report", n_prompts=N_PROMPTS, **asked)
    return checkpoint, opened(written)


def unexplained_columns(page: Path) -> set[str]:
    """Columns of the tables beside a page that have no meaning on it."""
    parts = page.read_text(encoding="utf-8").split("<summary>What the columns mean</summary>")[1:]
    listed = (part.partition("</details>")[0] for part in parts)
    explained = {name for part in listed for name in re.findall(r"<dt>(.*?)</dt>", part)}
    tables = page.parent.glob("*.csv")
    return {name for table in tables for name in pd.read_csv(table)} - explained


def opened(written: Report) -> Page:
    return Page(written.page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """A shortly trained model with a history, and the folder of its report."""
    folder = tmp_path_factory.mktemp("trained")
    steps = ("train.steps=60", "train.log_every=20", "train.snapshot_every=30")
    config = override(ExperimentConfig(), "seed=1", "train.n_eval_prompts=512", *steps)
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
def page(trained: tuple[Checkpoint, Path]) -> Page:
    return Page((trained[1] / PAGE_FILE).read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(page: Page, trained: tuple[Checkpoint, Path]):
    assert [name for name in ("src", "srcset", "action", "data") if page.attributes(name)] == []
    links = page.attributes("href")
    outside = [link for link in links if not re.fullmatch(r"#[\w-]+|\w+\.csv", link)]
    assert outside == list(PAPERS.values())  # to be clicked, not loaded
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    policy = [given["content"] for _, given in page.tags if given.get("http-equiv")]
    assert [text.partition(";")[0] for text in policy if text] == ["default-src 'none'"]
    assert "@import" not in page.source.partition("</style>")[0]
    libraries = [script for script in page.scripts if len(script) > 1_000_000]
    assert len(libraries) == 1
    assert "plotly.js v" in libraries[0]
    assert (trained[1] / PAGE_FILE).stat().st_size < 6_000_000
    assert page.open == []


def test_switches_have_the_risk_of_every_subset_and_what_heads_add(pair: tuple[Checkpoint, Page]):
    (box,) = [json.loads(found) for found in pair[1].attributes("data-found")]
    names = {"00": "none", "10": "L0H0", "01": "L0H1", "11": "L0H0 L0H1"}
    shown = {row["kept"]: row["risk"] for row in pair[1].rows("subsets")}
    assert {names[key]: risk for key, risk in box["said"].items()} == shown
    prompts = evaluation_prompts(pair[0], n_prompts=N_PROMPTS)[:5]
    outputs = head_outputs(pair[0].weights, prompts)
    np.testing.assert_allclose(box["outputs"], outputs, rtol=1e-5)
    predicted = np.sum(box["outputs"], axis=1) + box["rest"]
    np.testing.assert_allclose(predicted, pair[0].predictor.predict(prompts), rtol=1e-5)
    np.testing.assert_allclose(box["target"], prompts.y_query_clean, rtol=1e-6)


def test_figures_and_links_have_their_places(page: Page):
    assert len(page.drawn) == len(page.figures) == 18
    # The page gives the look; a figure that had one of its own would stay light on a dark page.
    assert not any("template" in figure["layout"] for figure in page.drawn)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    anchors = [link for link in page.attributes("href") if link.startswith("#")]
    assert set(anchors) <= {f"#{name}" for name in ids}
    assert page.source.count("<summary>How this was computed</summary>") == len(page.headings) == 10


def test_every_linked_table_can_be_read(page: Page, trained: tuple[Checkpoint, Path]):
    _, folder = trained
    links = [link for link in page.attributes("href") if link.endswith(".csv")]
    assert sorted(links) == sorted(file.name for file in folder.glob("*.csv"))
    tables = {link: pd.read_csv(folder / link) for link in links}
    for link, table in tables.items():
        assert len(table) > 0
        assert f"{link} ({counted(len(table), 'row')})" in page.text
    assert unexplained_columns(folder / PAGE_FILE) == set()
    assert list(tables["ablation.csv"]["method"]) == [
        *("zero", "zero", "mean", "mean", "resample", "resample")
    ]
    assert list(tables["subsets.csv"]["kept"]) == ["none", "L0H0", "L0H1", "L0H0 L0H1"]
    assert tables["history.csv"]["step"].max() == 60
    longest = Section("", "", "").longest_table
    for name in ("attention", "learners"):
        assert (len(tables[f"{name}.csv"]) <= longest) == (f'aria-label="{name}"' in page.source)


def test_tables_hold_the_numbers_of_the_analyses(trained: tuple[Checkpoint, Path]):
    checkpoint, folder = trained
    found = classify(checkpoint, n_prompts=N_PROMPTS).to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(folder / "heads.csv"), found)
    rows = compare_learners(checkpoint, n_prompts=N_PROMPTS).at_trained.reset_index()
    read = pd.read_csv(folder / "learners.csv").assign(note="")
    pd.testing.assert_frame_equal(read, rows)


def test_a_name_is_never_a_tag(pair: tuple[Checkpoint, Page]):
    checkpoint, page = pair
    assert checkpoint.name == EVIL
    assert EVIL not in page.source
    assert "onerror" not in [name for _, given in page.tags for name in given]
    # Title and heading.
    assert page.text.count(EVIL) == 2
    assert page.source.count("&lt;img src=x onerror=alert(1)&gt;") == 2


def test_a_number_that_is_none_is_a_dash(tmp_path: Path):
    checkpoint, page = write(tmp_path, "zero", zero_head(d_x=5), analyses=["classify"])
    found = classify(checkpoint, n_prompts=N_PROMPTS)
    scales = found.scales
    undefined = (scales.omega_spread, scales.zero_sum, found.substitution.r2)
    assert np.isnan(undefined).all()
    evidence = {row["evidence"]: row["value"] for row in page.rows("pattern")}
    assert evidence["omega_spread"] == "–"
    assert evidence["learner_r2"] == "–"


# Several layers.

TASK = TaskConfig(d_x=4, context_length=9)
SECTIONS = [
    *("What it does with a prompt", "What it computes", "Circuits", "Attention on prompts"),
    *("Which learner", "Head ablation", "Pruning", "Probes", "Edges between heads"),
]


def test_the_page_of_several_layers(tmp_path: Path):
    deep = wide_checkpoint(tmp_path / "deep")
    written = write_report(deep, tmp_path / "page", n_prompts=160)
    page = opened(written)
    assert page.open == []
    assert page.headings == SECTIONS
    assert len(page.drawn) == len(page.figures) == 16
    assert written.page.stat().st_size < 6_000_000
    assert written.verdict.replace("\n", "") in page.text
    assert "3 layers of 4 heads, softmax attention, width 12, d_x 4" in page.text
    assert unexplained_columns(written.page) == set()
    # The cost of a layer is that of masking all its heads at once.
    prompts = draw_prompts(TASK, 160, seed=0, dtype=torch.float64)
    full, masked = masked_errors(deep.model, prompts, [[], [(1, head) for head in range(4)]]).mean(
        0
    )
    layers = pd.read_csv(written.page.parent / "layers.csv")
    assert layers["layer_rise"][1] == pytest.approx(masked - full, rel=1e-9)


def test_training_is_shown_where_there_is_a_history(tmp_path: Path):
    model = ModelConfig(n_layers=2, n_heads=2, context_only=True, d_model=12, score="linear/L")
    train = TrainConfig(steps=40, log_every=10, batch_size=8, n_eval_prompts=16)
    train_models({".": ExperimentConfig(TASK, model, train)}, tmp_path / "model")
    checkpoint = load(tmp_path / "model")
    shown = ["history", "ablate-over-steps"]
    assert list(default_names(checkpoint))[-2:] == shown
    page = opened(write_report(checkpoint, tmp_path / "page", n_prompts=64, analyses=shown))
    assert page.headings == ["History", "Head ablation, step by step"]
    history = pd.read_csv(tmp_path / "page" / "history.csv")
    np.testing.assert_allclose(history["qk_norm"], checkpoint.history["qk_norm"], rtol=1e-6)
    assert unexplained_columns(tmp_path / "page" / PAGE_FILE) == set()


def test_somebody_elses_model_has_the_same_page(tmp_path: Path):
    checkpoint = loaded(tmp_path, garg().state_dict(), n_heads=4)
    page = opened(write_report(checkpoint, tmp_path / "page", n_prompts=160))
    # A causal model has a loss at every position.
    assert set(page.headings) == {*SECTIONS, "Loss over the number of examples"}
    assert "3 layers of 4 heads, softmax attention, width 16, MLPs of 64" in page.text
    assert "assumed: context_length, covariance, beta_var, noise_var" in page.text
    # Without noise and with more pairs than coordinates, least squares is exact.
    assert "times that of ridge" not in page.text


# Several models.

NAMES = ("softmax-h2-s0", "softmax-h2-s8", "linear-merged-s0")


def test_several_models_are_compared_and_the_bad_one_is_named(run: Run, tmp_path: Path):
    paths = [CHECKPOINTS / name for name in NAMES]
    out, unread = tmp_path / "page", tmp_path / f"{EVIL}.pt"
    torch.save({f"{EVIL}.weight": torch.ones(2)}, unread)
    ran = run("report", *paths, unread, "--out", out, "--n-prompts", 128, "--json")
    assert ran.code == 2
    assert list(ran.document) == ["checkpoints", "page", "tables", "verdict"]
    *good, bad = ran.document["checkpoints"]
    assert good == [{"path": str(path)} for path in paths]
    assert bad["path"] == str(unread)
    assert f"{EVIL}.weight" in bad["error"]
    counts = "linear-merged-s0: linear_gd 1; softmax-h2: debiased_gd 1, kernel_regression 1."
    verdict = f"3 models of 2 settings: {counts}"
    assert ran.document["verdict"] == f"{verdict} Left out: 1 of 4."
    tables = {Path(file).stem: pd.read_csv(file) for file in ran.document["tables"]}
    assert list(tables) == ["settings", "models", "fields", "left_out"]
    assert tables["models"]["checkpoint"].tolist() == sorted(NAMES)
    assert tables["left_out"].columns.tolist() == ["checkpoint", "error"]
    assert f"{bad['path']}: {tables['left_out']['error'].item()}" == bad["error"]
    fields = tables["fields"].set_index("setting")
    assert fields.loc["linear-merged-s0", "model.merged_qk"]
    assert "linear/L" in fields["model.score"].tolist()  # without quotation marks
    assert unexplained_columns(out / PAGE_FILE) == {*fields.columns, "error"}
    text = (out / PAGE_FILE).read_text(encoding="utf-8")
    assert html.escape(verdict) in re.sub(
        r"<a [^>]*>|</a>", "", text
    )  # terms lead to their meaning
    assert EVIL not in text
    assert Page(text).headings == ["Settings and models", "Left out"]
    run("report", *paths, "--out", out, "--n-prompts", 64).assert_refused(out, "already exists")
    ran = run("report", *paths[:2], "--out", out, "--n-prompts", 64, "--overwrite").done()
    assert ran.out.startswith("2 models of 1 setting: softmax-h2: debiased_gd 1, kernel_regr")
