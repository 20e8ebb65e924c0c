"""The page is one file that says what it found, opens offline and trusts no name it is given."""

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from mechinterp.analysis.ablation.subsets import ablate_subsets
from mechinterp.analysis.learners.compare import fit_learners
from mechinterp.analysis.number_format import cell, digits, with_error
from mechinterp.analysis.one_layer.circuits import Circuits
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.result import Band, Table, meanings
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.load import load as read_any
from mechinterp.config import ExperimentConfig, override
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.heads import AttentionWeights, stack
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.report import to_html
from mechinterp.report.page import PAGE, Report, write_figure, write_report
from mechinterp.report.to_html import PAPERS, WORDS, Section
from mechinterp.training.train import train_models

N_PROMPTS = 128
EVIL = "<img src=x onerror=alert(1)>"
WORSE = "the model is worse than predicting 0"
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


def write(folder: Path, name: str, weights: AttentionWeights) -> tuple[Checkpoint, Page]:
    """A checkpoint of hand-built weights, without history, and its page in `folder`/report."""
    config = override(ExperimentConfig(), f"model.n_heads={weights.n_heads}")
    save(folder / name, config, weights, step=0)
    checkpoint = load(folder / name)
    return checkpoint, opened(write_report(checkpoint, folder / "report", n_prompts=N_PROMPTS))


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
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Page]:
    return write(tmp_path_factory.mktemp("single"), "one", kernel_head(0.5, 1.5, d_x=5))


@pytest.fixture(scope="module")
def page(trained: tuple[Checkpoint, Path]) -> Page:
    return Page((trained[1] / PAGE).read_text(encoding="utf-8"))


@pytest.mark.slow
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
    assert (trained[1] / PAGE).stat().st_size < 6_000_000
    assert page.open == []


@pytest.mark.slow
def test_switches_have_the_risk_of_every_subset_and_what_heads_add(pair: tuple[Checkpoint, Page]):
    (box,) = [json.loads(found) for found in pair[1].attributes("data-found")]
    names = {"00": "none", "10": "H0", "01": "H1", "11": "H0 H1"}
    shown = {row["kept"]: row["risk"] for row in pair[1].rows("subsets")}
    assert {names[key]: risk for key, risk in box["said"].items()} == shown
    found = ablate_subsets(pair[0], n_prompts=N_PROMPTS)
    np.testing.assert_allclose(box["outputs"], found.outputs, rtol=1e-9)
    prompts = evaluation_prompts(pair[0], n_prompts=N_PROMPTS)[:5]
    predicted = np.sum(box["outputs"], axis=1) + box["rest"]
    np.testing.assert_allclose(predicted, pair[0].predictor.predict(prompts), rtol=1e-5)
    np.testing.assert_allclose(box["target"], prompts.y_query_clean, rtol=1e-6)


@pytest.mark.slow
def test_dummy_heads_are_folded_away(tmp_path: Path):
    weights = debiased_gradient_step(0.88, 0.02, d_x=5)
    _, found = write(tmp_path, "padded", stack([weights, zero_head(d_x=5)]))
    before, folded = found.source.split('<details class="dummies">')
    assert "1 dummy head: head 2" in folded
    assert "head 2: dummy" in folded
    assert "head 2: dummy" not in before
    assert "head 1: negative" in before


@pytest.mark.slow
def test_the_page_names_the_papers_and_explains_its_words(page: Page):
    assert set(page.attributes("href")) >= set(PAPERS.values())
    told = Path("docs/words.md").read_text(encoding="utf-8")
    for words, meaning in WORDS.items():
        assert meaning in page.text
        assert all(word in told for word in words.split(", "))


@pytest.mark.slow
def test_terms_lead_to_their_meaning(page: Page):
    links = [given for tag, given in page.tags if given.get("class") == "term"]
    ids = page.attributes("id")
    assert {given["title"] for given in links} <= set(WORDS.values())
    assert all((given["href"] or "").removeprefix("#") in ids for given in links)
    assert 'class="term"' in page.source.partition("</header>")[0]


def test_a_figure_by_itself_has_a_title(tmp_path: Path):
    figure = go.Figure(layout={"title": {"text": "Jumps & <levels>"}})
    write_figure(tmp_path / "one.html", figure)
    text = (tmp_path / "one.html").read_text(encoding="utf-8")
    assert "<title>Jumps &amp; &lt;levels&gt; · mechinterp</title>" in text


def test_every_figure_is_drawn(page: Page):
    assert page.figures == [
        *("figure-heads", "figure-circuits", "figure-attention", "figure-similarity"),
        *("figure-ablation", "figure-shapley", "figure-fit_distance", "figure-fit_loss"),
        *("figure-loss", "figure-omega", "figure-mu", "figure-classify_loss"),
        *("figure-heads_over_steps", "figure-circuits_over_steps"),
    ]
    assert len(page.drawn) == len(page.figures)
    assert all(figure["data"] for figure in page.drawn)
    # The page gives the look; a figure that had one of its own would stay light on a dark page.
    assert not any("template" in figure["layout"] for figure in page.drawn)
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
    assert list(tables["ablation.csv"]["method"]) == [
        *("zero", "zero", "mean", "mean", "resample", "resample")
    ]
    assert list(tables["subsets.csv"]["kept"]) == ["none", "H0", "H1", "H0 H1"]
    assert tables["history.csv"]["step"].max() == 60
    longest = Section("", "", "").longest_table
    for name in ("attention", "fits"):
        assert (len(tables[f"{name}.csv"]) <= longest) == (f'aria-label="{name}"' in page.source)
    assert "<caption>Fits at L = 40; loss gap is the model" in page.source


@pytest.mark.slow
def test_tables_hold_the_numbers_of_the_analyses(trained: tuple[Checkpoint, Path]):
    checkpoint, folder = trained
    found = classify(checkpoint, n_prompts=N_PROMPTS).to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(folder / "heads.csv"), found)
    fits = fit_learners(checkpoint, n_prompts=N_PROMPTS).to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(folder / "fits.csv"), fits)


@pytest.mark.slow
def test_sections_and_their_links(page: Page, single: tuple[Checkpoint, Page]):
    names = ["What it computes", "Circuits", "Attention on prompts", "Head ablation"]
    names += ["Which learner", "Training"]
    names += ["What it computes, step by step", "Circuits, step by step"]
    assert page.headings == names
    anchors = [link for link in page.attributes("href") if re.match("#(?!word)", link)]
    assert anchors == ["#content", *(f"#section-{i}" for i in range(1, 9))]
    assert set(anchors) <= {f"#{name}" for name in page.attributes("id")}
    assert page.source.count("<summary>How this was computed</summary>") == 8
    assert "logged steps, 0 to 60; loss at the end on fixed prompts" in page.text
    # A checkpoint without history and snapshots has no section about its training.
    assert single[1].headings == names[:-3]
    assert "Training" not in single[1].text


@pytest.mark.slow
def test_the_verdict_is_on_the_page_and_names_model_pattern_and_learner(tmp_path: Path):
    checkpoint, page = write(tmp_path, "step", debiased_gradient_step(0.88, 0.02, d_x=5))
    written = write_report(checkpoint, tmp_path / "again", n_prompts=N_PROMPTS)
    assert written.page == tmp_path / "again" / PAGE
    assert all(table.exists() for table in written.tables)
    assert written.verdict.replace("\n", "") in page.text
    assert written.verdict == str(classify(checkpoint, n_prompts=N_PROMPTS).verdict)
    assert "one step of gradient descent" in written.verdict
    assert "(debiased_gd): ŷ = 0.880 (1/L)" in written.verdict
    # The best step for this task, 1 / (1 + 1.1 * 5 / 40), and the loss, stand at the top.
    assert "best step size for the task: 0.879" in page.text
    loss = str(classify(checkpoint, n_prompts=N_PROMPTS).loss)
    assert page.text.index(f"Loss on its task: {loss}") < page.text.index("Circuits")


@pytest.mark.slow
def test_heads_without_which_the_model_breaks_are_named(
    pair: tuple[Checkpoint, Page], single: tuple[Checkpoint, Page]
):
    assert WORSE in pair[1].text
    assert WORSE not in single[1].text
    assert "(kernel_regression): ŷ = " in single[1].text


@pytest.mark.slow
def test_a_name_is_never_a_tag(pair: tuple[Checkpoint, Page]):
    checkpoint, page = pair
    assert checkpoint.name == EVIL
    assert EVIL not in page.source
    assert "onerror" not in [name for _, given in page.tags for name in given]
    # Title and heading.
    assert page.text.count(EVIL) == 2
    assert page.source.count("&lt;img src=x onerror=alert(1)&gt;") == 2


@pytest.mark.slow
def test_a_number_that_is_none_is_a_dash(tmp_path: Path):
    checkpoint, page = write(tmp_path, "zero", zero_head(d_x=5))
    found = classify(checkpoint, n_prompts=N_PROMPTS)
    scales = found.scales
    undefined = (scales.omega_spread, scales.zero_sum, found.substitution.r2)
    assert np.isnan(undefined).all()
    evidence = {row["evidence"]: row["value"] for row in page.rows("pattern")}
    assert evidence["omega_spread"] == "–"
    assert evidence["R² of the closed form"] == "not defined"
    # Meanings of columns say where a number is NaN.
    meant = r"<details><summary>What the columns mean</summary>.*?</details>"
    text = Page(re.sub(meant, "", page.source, flags=re.DOTALL)).text
    assert "nan" not in text.lower().split()
    assert "Rank correlation with the weight: head 0 not defined" in text
    assert "no head is active" in page.text


def test_the_first_row_of_a_history_has_no_training_loss(page: Page):
    row = page.rows("history")[0]
    assert (row["step"], row["loss"]) == ("0", "–")
    assert re.fullmatch(r"\d\.\d+", row["eval_loss"])


@pytest.mark.slow
def test_a_report_is_not_overwritten_unless_asked(tmp_path: Path):
    checkpoint, _ = write(tmp_path, "one", kernel_head(0.5, 1.5, d_x=5))
    for file in (tmp_path / "report").glob("*.csv"):
        file.write_text("mine")
    page = (tmp_path / "report" / PAGE).read_text()
    with pytest.raises(ValueError, match="already exists and is not overwritten") as error:
        write_report(checkpoint, tmp_path / "report", n_prompts=N_PROMPTS)
    assert str(error.value).startswith(str(tmp_path / "report"))
    assert {file.read_text() for file in (tmp_path / "report").glob("*.csv")} == {"mine"}
    assert (tmp_path / "report" / PAGE).read_text() == page
    folder = str(tmp_path / "report")
    written = write_report(checkpoint, folder, n_prompts=N_PROMPTS, overwrite=True)
    assert "mine" not in {file.read_text() for file in (tmp_path / "report").iterdir()}
    assert written.page.stat().st_size > 1_000_000


@pytest.mark.slow
def test_a_folder_with_other_things_and_a_file_are_no_place_for_a_report(
    single: tuple[Checkpoint, Page], tmp_path: Path
):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="already exists and is not overwritten"):
        write_report(single[0], tmp_path, n_prompts=N_PROMPTS)
    with pytest.raises(ValueError, match="already exists and is not overwritten"):
        write_report(single[0], tmp_path / "notes.txt", n_prompts=N_PROMPTS, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_every_column_is_explained(trained: tuple[Checkpoint, Path]):
    assert unexplained_columns(trained[1] / PAGE) == set()
    expected = {"mu_1": "One entry. Diagonal of OV's y block."}
    assert meanings(Circuits, ["mu_1", "unheard_of"]) == expected


def test_a_head_has_a_card_with_its_numbers(page: Page, trained: tuple[Checkpoint, Path]):
    found = classify(trained[0], n_prompts=N_PROMPTS)
    titles = re.findall(r"<h3>(.*?)</h3>", page.source)
    assert titles == [f"head {head}: {label}" for head, label in enumerate(found.labels)]
    cards = page.source.split('<article class="card"')[1:]
    rows = pd.read_csv(trained[1] / "ablation.csv")
    for head, card in enumerate(cards):
        facts = dict(re.findall(r"<dt>(.*?)</dt><dd>([^<]*)", card))
        assert facts["omega (1/x²)"] == f"{found.circuits.omega_mean[head]:+.3g}"
        assert facts["share of output"] == f"{found.share[head]:.1%}"
        assert facts["zero ablation (y²)"] == with_error(rows["rise"][head], rows["rise_sem"][head])


def test_numbers_stand_beside_those_of_random_weights(page: Page, trained: tuple[Checkpoint, Path]):
    found = classify(trained[0], n_prompts=N_PROMPTS)
    low, high = found.random_ranges["substitution_r2"]
    evidence = {row["evidence"]: row["random_weights"] for row in page.rows("pattern")}
    said = f"{digits(low)} to {digits(high)}"
    assert evidence["R² with idealised heads"].startswith(said)
    assert evidence["eta"] == ""
    table = pd.read_csv(trained[1] / "pattern.csv").set_index("evidence")["random_weights"]
    assert table["R² with idealised heads"] == said
    # Five numbers on each card, and four in the table of evidence.
    assert page.source.count('<svg class="band"') == 5 * len(found.labels) + 4
    assert "<title>random weights: " in page.source


def test_p_values_at_their_floor_are_below_it(page: Page, trained: tuple[Checkpoint, Path]):
    found = classify(trained[0], n_prompts=N_PROMPTS)
    said = {row["evidence"]: row["value"] for row in page.rows("pattern")}
    for name, p in found.p_values.items():
        least = 1 / found.n_random
        assert said[f"p of {name}"] == (f"&lt; {least:.2g}" if p <= least else cell(p, "p_value"))
    frame = pd.DataFrame({"p_value": [0.0, 1e-13, 0.25], "rise": [0.0, 1e-13, 0.25]})
    table = Section("p", "R² = 1 ± 0", "", tables={"table": Table(frame)})
    rows = Page(to_html.page("name", "", "", [table], files=())).rows("table")
    assert [row["p_value"] for row in rows] == ["&lt; 1e-12", "&lt; 1e-12", "0.25"]
    assert [row["rise"] for row in rows] == ["0", "0", "0.250"]


def test_a_band_lies_on_a_scale_that_holds_0_and_the_number():
    assert Band(value=1.0, low=0.25, high=0.5).places == (25, 50, 100)
    assert Band(value=-1.0, low=-0.5, high=1.0).places == (25, 100, 0)
    assert Band(value=0.0, low=0.0, high=0.0).places == (0, 0, 0)
    assert str(Band(value=1.0, low=0.25, high=0.5)) == "0.250 to 0.500"


def test_figures_of_a_section_share_the_frames_of_its_slider(page: Page):
    sliders = [json.loads(text) for text in page.attributes("data-frames")]
    assert sliders == [["0", "1", "2", "3", "4"], *[["0", "30", "60"]] * 2]
    moving = [figure for figure in page.drawn if figure.get("frames")]
    expected = [*[sliders[0]] * 2, *[sliders[1]] * 3]
    assert [[frame["name"] for frame in figure["frames"]] for figure in moving] == expected
    assert [list(figure["titles"]) for figure in moving] == expected
    assert moving[4]["titles"]["60"] == "QK and OV circuits at step 60"
    # The page has a slider and titles of its own.
    assert not any({"sliders", "title"} & set(figure["layout"]) for figure in page.drawn)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_pair_is_not_explained_where_scores_are_no_average(tmp_path: Path):
    written = write_report(load("checkpoints/linear-separate-s0"), tmp_path, n_prompts=N_PROMPTS)
    text = opened(written)
    assert {"head 0: negative", "head 4: positive"} <= set(
        re.findall(r"<h3>(.*?)</h3>", text.source)
    )
    assert WORSE not in text.text
    assert "Jumps predicted from the initial weights" in text.headings
    assert text.figures[-4:] == [
        *("figure-circuits_over_steps", "figure-components_loss"),
        *("figure-components_over_steps", "figure-component_heads_over_steps"),
    ]
    assert written.page.stat().st_size < 6_000_000


@pytest.mark.slow
def test_what_a_file_does_not_say_is_called_assumed_and_no_training_is_made_up(tmp_path: Path):
    # With linear scores it is a step of size 3, which does worse than predicting 0.
    weights = kernel_head(3.0, 1.0, d_x=5)
    names = ("W_Q", "W_K", "W_V", "W_O")
    np.savez(tmp_path / "own.npz", **{name: getattr(weights, name).numpy() for name in names})
    written = write_report(read_any(tmp_path / "own.npz"), tmp_path / "page", n_prompts=64)
    text = written.page.read_text(encoding="utf-8")
    (about,) = re.findall(r'<p class="about">([^<]*)</p>\n<p class="verdict">', text)
    assert "assumed, as the file does not state it: " in about
    told = ("score softmax", "context_length 40", "beta_var 0.2 (1/d_x)", "noise_var 0.1")
    for assumed in (*told, "columns x,y", "assumed: context_length, covariance, beta_var"):
        assert assumed in about
    assert not re.search(r"\b(seed|step|config)\b", about)


@pytest.mark.slow
def test_one_layer_that_was_trained_as_several_are_has_its_curves(tmp_path: Path):
    steps = ("train.steps=20", "train.log_every=10", "train.snapshot_every=20")
    sizes = ("model.context_only=true", "model.d_head=6", "train.n_eval_prompts=64")
    train_models({".": override(ExperimentConfig(), *steps, *sizes)}, tmp_path / "model")
    checkpoint = load(tmp_path / "model")
    assert "omega" not in checkpoint.history
    page = opened(write_report(checkpoint, tmp_path / "page", n_prompts=N_PROMPTS))
    assert page.headings[-2:] == ["What it computes, step by step", "Circuits, step by step"]
    assert {"figure-qk_norm", "figure-circuits", "figure-circuits_over_steps"} <= set(page.figures)
