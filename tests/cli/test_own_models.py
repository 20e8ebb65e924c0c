"""Modules of a user's own code on the command line: every command gives what Python gives."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from mechinterp.analysis.check import check
from mechinterp.analysis.registry import ANALYSES, own_object, run_analysis
from mechinterp.analysis.result import fields_of
from mechinterp.checkpoints.modules.hooked import hook_module
from mechinterp.cli.own_model import OF_FUNCTIONS
from mechinterp.report.to_json import dumps, to_json
from tests.conftest import Run

SOURCE = """
from functools import partial
import torch
from torch import nn
from mechinterp import hook_module

TASK = {"d_x": 3, "context_length": 6}


def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 1))


def half_of_the_first(prompts):
    return prompts.y[:, 0] / 2


first_times = partial(lambda factor, prompts: factor * prompts.y[:, 0], 0.5)
half_in_a_lambda = lambda prompts: prompts.y[:, 0] / 2


def prints(prompts):
    print("from inside")
    return prompts.y[:, 0] / 2


def leaves():
    raise SystemExit


def leaves_later(prompts):
    raise SystemExit("bye")


def two(prompts, seed):
    return prompts.y[:, 0]


model = build()
hooked = hook_module(model, task=TASK)
"""
TASK = {"d_x": 3, "context_length": 6}
NAMED = "module_of_mine:model"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "module_of_mine.py").write_text(SOURCE)
    (tmp_path / "task.json").write_text(json.dumps(TASK))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_of_mine", raising=False)
    return tmp_path


def test_every_analysis_of_a_module_is_that_of_python(run: Run, mine: Path):
    module = hook_module(own_object(NAMED), task=TASK)
    runs = check(module, n_prompts=32).to_frame().set_index("analysis")["runs"]
    assert runs.sum() >= 12
    for name in runs.index[runs]:
        seeded = ["--n-prompts", 64] if ANALYSES[name].draws_prompts else []
        shown = (
            run(name, NAMED, "--task", "task.json", *seeded, "--json", "--quiet").done().document
        )
        shown = shown[0] if isinstance(shown, list) else shown
        assert (shown.pop("path"), shown.pop("format")) == (NAMED, "module"), name
        found = run_analysis(name, module, n_prompts=64 if seeded else None)
        expected = json.loads(dumps(to_json(name, module, found)))
        assert shown == {k: v for k, v in expected.items() if k not in ("path", "format")}, name


def test_a_module_has_a_row_and_a_page(run: Run, mine: Path):
    stated = ("--task", "task.json", "--n-prompts", 64, "--quiet")
    run("classify", NAMED, *stated, "--out", "rows.csv").done()
    row = pd.read_csv(mine / "rows.csv").iloc[0]
    assert (row["path"], row["format"], row["n_layers"], row["n_heads"]) == (NAMED, "module", 1, 2)
    run("report", NAMED, *stated, "--analysis", "ablate", "--out", "page").done()
    assert NAMED in (mine / "page" / "index.html").read_text()


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_a_function_of_prompts_is_analysed_as_in_python(run: Run, mine: Path, name: str):
    own = "module_of_mine:half_of_the_first"
    stated = ("--task", "task.json", "--n-prompts", 256, "--json", "--quiet")
    shown = run(name, own, *stated).done().document
    assert (shown.pop("path"), shown.pop("format")) == (own, "function")
    found = run_analysis(name, own_object(own), task=TASK, n_prompts=256)
    assert shown == json.loads(
        dumps({"schema_version": 3, "analysis": name, **fields_of(name, found)})
    )


@pytest.mark.parametrize("own", ["first_times", "half_in_a_lambda"])
def test_a_function_without_a_name_has_the_one_that_was_typed(run: Run, mine: Path, own: str):
    words = ("--task", "task.json", "--n-prompts", 256, "--json", "--quiet")
    shown, named = (
        run("response", f"module_of_mine:{each}", *words).done().document
        for each in (own, "half_of_the_first")
    )
    assert shown.pop("path") == f"module_of_mine:{own}"
    del named["path"]
    assert shown == named


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_a_function_in_float32_gives_the_numbers_of_float64(run: Run, mine: Path, name: str):
    lines = "import torch\nW = torch.eye(3)\ndef model(prompts):\n    w = (prompts.y * prompts.x).mean(1)\n"
    (mine / "single_of_mine.py").write_text(
        f"{lines}    return ((w @ W) * prompts.x_query).sum(1, keepdim=True)\n"
    )
    lines = lines.replace("torch.eye(3)", "torch.eye(3).double()").replace(
        "prompts.y ", "prompts.y.double() "
    )
    (mine / "double_of_mine.py").write_text(
        f"{lines}    return ((w @ W) * prompts.x_query).sum(1, keepdim=True)\n"
    )
    words = ("--task", "task.json", "--n-prompts", 256, "--json", "--quiet")
    single, double = (
        run(name, f"{each}_of_mine:model", *words).done().document for each in ("single", "double")
    )
    key = "rows" if "rows" in single else "identities"
    assert len(single[key]) == len(double[key])
    for one, other in zip(single[key], double[key], strict=True):
        for column, value in one.items():
            # The disagreement is a ratio of two numbers that are 0 for this learner.
            if isinstance(value, float) and one.get("name") != "disagreement":
                assert value == pytest.approx(other[column], rel=1e-2, abs=1e-5), (
                    name,
                    column,
                    one,
                )


def test_a_length_of_the_command_is_that_of_a_function(run: Run, mine: Path):
    own = "module_of_mine:half_of_the_first"
    stated = ("--task", "task.json", "--n-prompts", 256, "--json", "--quiet")
    shown = run("response", own, *stated, "--context-length", 9).done().document
    found = run_analysis(
        "response", own_object(own), task={**TASK, "context_length": 9}, n_prompts=256
    )
    assert shown["rows"] == json.loads(dumps(fields_of("response", found)))["rows"]


def test_a_module_is_named_with_what_is_assumed(run: Run, mine: Path):
    err = run("error-curve", "module_of_mine:hooked", "--n-prompts", 16).done().err
    assert "task.noise_var = 0.1" in err
    assert "task.d_x" not in err


def test_prints_of_a_users_code_are_not_in_the_json(run: Run, mine: Path):
    settings = ("--task", "task.json", "--n-prompts", 256)
    ran = run("compare-learners", "module_of_mine:prints", *settings, "--json")
    silent = run("compare-learners", "module_of_mine:half_of_the_first", *settings, "--json")
    assert ran.done().document["rows"] == silent.document["rows"]
    assert "from inside" in ran.err
    assert "from inside" in run("compare-learners", "module_of_mine:prints", *settings).done().out
    assert "Usage" in run("compare-learners", "--json", "--help").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("info", NAMED), ("info", "module")),
        (("convert", NAMED, "--to", "npz", "--out", "new.npz"), ("convert", "module")),
        (("classify", NAMED, "--score", "softmax"), ("score", "hook_module")),
        (("ablate", "module_of_mine:hooked", "--n-heads", 2), ("n_heads", "hooked already")),
        (("ablate", "module_of_mine:TASK"), ("dict",)),
        (("ablate", "module_of_mine:none"), ("'none'",)),
        (("classify", "module_of_mine:half_of_the_first"), ("function of prompts", "response")),
        (("ablate", "module_of_mine:half_of_the_first"), ("function",)),
        (("response", "module_of_mine:first_times", "--n-heads", 2), ("no heads", "2")),
        (("classify", "module_of_mine:leaves"), ("leaves", "SystemExit")),
        (("response", "module_of_mine:leaves_later", "--task", "task.json"), ("SystemExit: bye",)),
        (("response", "module_of_mine:two"), ("function of prompts", "seed")),
        (("ablate", "nothing_of_mine:model"), ("nothing_of_mine",)),
    ],
)
def test_what_a_module_cannot_be_asked_is_refused(run: Run, mine: Path, words, said):
    run(*words).assert_refused(*said)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:", ("SyntaxError", "line 1")),
        ("\nraise RuntimeError('no\\nweights')", ("RuntimeError: no weights", "line 2")),
        ("import sys; sys.exit(3)", ("SystemExit: 3",)),
        ("import a_package_that_is_not_here", ("a_package_that_is_not_here",)),
        ("import torch\nmodel = lambda prompts: prompts.x", ("[layer, 64, 1]", "[64, 6, 3]")),
        ("import torch\nmodel = lambda prompts: prompts.y[:, 0, 0]", ("[64, 1]", "got [64]")),
        ("model = lambda prompts: 'nothing'", ("[64, 1]", "got str")),
        ("\nmodel = lambda prompts: prompts.z", ("AttributeError", "line 2")),
        (
            "import torch\nmodel = lambda prompts: prompts.x @ torch.eye(9)",
            ("RuntimeError", "line 2"),
        ),
    ],
)
def test_a_broken_file_or_function_is_one_line(run: Run, mine: Path, source: str, said):
    name = f"broken_{abs(hash(source))}"
    (mine / f"{name}.py").write_text(source)
    words = ("--task", "task.json", "--n-prompts", 64)
    run("compare-learners", f"{name}:model", *words).assert_refused(f"{name}:model", *said)


@pytest.mark.parametrize("command", ["classify", "score"])
def test_a_module_or_a_method_that_fails_is_one_line_with_its_place(
    run: Run, mine: Path, command: str
):
    (mine / "failing_of_mine.py").write_text(
        "from torch import nn\n\nclass Failing(nn.Linear):\n    def forward(self, tokens):\n        return {}['x']\n\n"
        "model = Failing(4, 4)\n\ndef method(entry):\n    return entry.names['x']\n"
    )
    if command == "score":
        options = ("--suite", 1, "--trained", "none")
        said = ("method", "AttributeError", "failing_of_mine.py, line 10")
        run("score", "failing_of_mine:method", *options).assert_refused(*said)
    else:
        ran = run("classify", "failing_of_mine:model", "--task", "task.json")
        ran.assert_refused("KeyError: 'x'", "failing_of_mine.py, line 5")


def test_a_file_with_a_colon_in_its_name_stays_a_file(run: Run, mine: Path):
    (mine / "module_of_mine:model").write_text("no weights")
    run("ablate", NAMED).assert_refused(NAMED, "file")
