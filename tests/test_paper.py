"""Figures for print: sizes, type and ground of the copy; files where kaleido and a browser are there, else one line."""

import shutil
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from mechinterp import figures, paper
from mechinterp.display import Result
from mechinterp.paper import for_print, save_figure

LINES = figures.lines(
    np.arange(5.0), {"one": np.arange(5.0)}, title="A title", x_title="x", y_title="y"
)
draws = pytest.mark.skipif(
    util.find_spec("kaleido") is None or shutil.which("chromium") is None,
    reason="drawing needs kaleido and chromium",
)


def test_the_copy_is_in_sizes_of_print_and_the_figure_is_left_alone():
    before = LINES.to_dict()
    printed = for_print(LINES, width=3.3)
    assert printed.layout.width == round(3.3 * 96)
    assert printed.layout.font.size == pytest.approx(8 * 96 / 72)  # 8 points
    assert printed.layout.title.text == ""
    assert for_print(LINES, width=3.3, height=2.5, title="T").layout.height == 240
    assert for_print(LINES, title="T").layout.title.text == "T"
    assert LINES.to_dict() == before


class Found(Result):
    def plot(self):
        return LINES


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path: Path, monkeypatch):
    with pytest.raises(ValueError, match=r"figure\.doc: must end in \.pdf, \.svg or \.png\.$"):
        save_figure(LINES, tmp_path / "figure.doc")
    monkeypatch.setattr(paper, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"need kaleido; pip install 'mechinterp-icl\[figures\]'\.$"
    ):
        Found().save_figure(tmp_path / "figure.pdf")
    monkeypatch.setattr(paper, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"^width must be > 0 inches, got 0\.$"):
        save_figure(LINES, tmp_path / "figure.pdf", width=0)
    with pytest.raises(ValueError, match=r"a result with a plot is needed, got Result\.$"):
        save_figure(Result(), tmp_path / "figure.pdf")
    assert not list(tmp_path.iterdir())


@draws
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_report_has_its_figures_as_files(tmp_path: Path):
    from mechinterp import load, write_report
    from tests.conftest import CHECKPOINTS

    checkpoint = load(CHECKPOINTS / "softmax-h1-s0")
    asked = {"n_prompts": 64, "analyses": ["circuits", "attention"], "figures": "svg"}
    write_report(checkpoint, tmp_path / "page", **asked)
    names = {file.name for file in (tmp_path / "page").glob("*.svg")}
    assert names == {"circuits.svg", "attention.svg", "similarity.svg"}
    # The page knows them as its own, so that it can be written anew.
    write_report(checkpoint, tmp_path / "page", overwrite=True, **asked)
