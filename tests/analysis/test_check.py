"""First look at a model: losses by hand, how settings are known, and analyses that run or refuse as it says."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import TaskConfig, check, hook_module, load, p_probe, sample_prompts
from mechinterp.analysis.check import OF_STREAM
from mechinterp.analysis.registry import ANALYSES, run_analysis
from tests.checkpoints.strange_modules import Grouped, Heads, Stack, random
from tests.checkpoints.test_module_weights import Own, one_length, with_circuits
from tests.conftest import CHECKPOINTS, Run, refused
from tests.test_doors import as_for_users

TASK = TaskConfig(d_x=3, context_length=6)
SHIPPED = CHECKPOINTS / "softmax-h2-s0"
MODULES = {
    "grouped": lambda: random(Stack(Grouped(), Grouped(), norm=True)),
    "heads": lambda: random(Stack(Heads(), Heads())),
    "encoder": lambda: random(
        nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 1))
    ),
}
LONG = ("local-learning-coefficient", "history", "response")
FEW = {"n_prompts": 64}


def hooked(kind: str):
    return hook_module(MODULES[kind](), task=TASK)


def statuses(found) -> dict[str, str]:
    return dict(zip(found.settings["setting"], found.settings["how"], strict=True))


@pytest.mark.parametrize("kind", ["grouped", "file"])
def test_losses_are_those_by_hand(kind):
    model = load(SHIPPED) if kind == "file" else hooked(kind)
    found, task = check(model, n_prompts=256, seed=3), model.task
    prompts = sample_prompts(model, 256, seed=3)
    with torch.no_grad():
        own = model.predictor.predict(prompts).double()
    X, y = prompts.x.double(), prompts.y.double()
    penalty = task.noise_var * task.d_x * torch.eye(task.d_x)
    beta = torch.linalg.solve(X.mT @ X + penalty, X.mT @ y)
    best = (prompts.x_query.double()[:, None] @ beta)[:, 0]
    for prediction, loss, sem in (
        (own, found.loss.model, found.loss.model_sem),
        (best, found.loss.ridge, found.loss.ridge_sem),
        (0 * own, found.loss.zero, found.loss.zero_sem),
    ):
        errors = (prediction - prompts.y_query.double()).square().mean(1)
        assert loss == pytest.approx(errors.mean().item(), rel=1e-4)
        assert sem == pytest.approx(errors.std().item() / 16, rel=1e-4)


def test_what_is_assumed_comes_first_and_what_is_proven_is_said():
    found = check(MODULES["grouped"](), task={"d_x": 3}, n_prompts=32)
    how = statuses(found)
    assert list(found.settings["how"]) == sorted(
        found.settings["how"], key=("assumed", "stated", "proven", "known").index
    )
    assert how["d_x"] == "stated"
    assert how["noise_var"] == how["input"] == how["prediction"] == "assumed"
    assert how["weights by name"] == "proven"
    assert "2 layers of 4 heads" in found.model
    read = hook_module(MODULES["heads"](), task=TASK, read=lambda output: output[:, -1])
    other = statuses(check(read, n_prompts=32))
    assert other["prediction"] == "stated"
    assert other["weights by name"] == "proven"
    assert set(statuses(check(load(SHIPPED), n_prompts=32)).values()) == {"known"}


@pytest.mark.parametrize("kind", [*MODULES, "file"])
def test_it_fits_one_screen(kind):
    lines = str(check(SHIPPED if kind == "file" else hooked(kind), n_prompts=32)).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_a_model_that_predicts_nothing_is_doubted():
    module = MODULES["encoder"]()
    module[1].weight.mul_(100)
    assert "no better than 0" in check(module, task=TASK, n_prompts=64).doubt
    assert not check(load(SHIPPED), n_prompts=64).doubt


def test_a_stack_with_a_stream_runs_probes_and_edges():
    runs = check(hooked("grouped"), n_prompts=32).to_frame().set_index("analysis")["runs"]
    assert runs[["probe", "p-probe", "patch-activations", "attribute-edges"]].all()
    assert not runs[["circuit-faithfulness", "compare-priors", "history"]].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MODULES, "file"])
def test_analyses_run_or_refuse_as_it_says(kind):
    model = load(SHIPPED) if kind == "file" else hooked(kind)
    frame = check(model, n_prompts=32).to_frame().set_index("analysis")
    assert list(frame.index) == list(ANALYSES)
    for name, analysis in ANALYSES.items():
        if name in LONG:
            continue
        few = FEW if analysis.draws_prompts else {}
        if frame["runs"][name]:
            assert not frame["lacks"][name]
            run_analysis(name, model, **few)
        else:
            assert frame["lacks"][name]
            with pytest.raises(ValueError, match=r".") as caught:
                run_analysis(name, model, **few)
            assert "\n" not in str(caught.value)


def test_a_copy_of_the_table_and_a_figure_of_the_losses():
    found = check(SHIPPED, n_prompts=64)
    frame = found.to_frame()
    frame["runs"] = False
    assert found.to_frame()["runs"].any()
    loss = found.loss
    np.testing.assert_allclose(found.plot().data[0].y, [loss.model, loss.ridge, loss.zero])


def test_a_module_in_bfloat16_is_checked_and_probed():
    module = hook_module(MODULES["encoder"]().to(torch.bfloat16), task=TASK)
    prompts = sample_prompts(module, 64)
    zero = prompts.y_query.double().square().mean().item()
    assert check(module, prompts).loss.zero == pytest.approx(zero, rel=1e-6)
    assert np.isfinite(p_probe(module, prompts, steps=2).risk).all()


def test_no_prompts_are_refused():
    with refused("n_prompts", "0"):
        check("softmax-h1-s0", n_prompts=0)


def test_what_is_no_model_is_refused():
    with as_for_users(), pytest.raises(ValueError, match="a path, got a TaskConfig"):
        check(TASK)


def test_analyses_that_lack_the_same_share_a_line_and_no_class_of_ours_is_named():
    class Beside(nn.Module):
        """The read-out gets the heads' outputs beside their input."""

        def __init__(self):
            super().__init__()
            self.inp, self.attn = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(16, 1)

        def forward(self, x):
            h = self.inp(x)
            return self.out(torch.cat([h, self.attn(h, h, h)[0]], -1))

    found = check(random(Beside()), task=TASK, n_prompts=32)
    frame = found.to_frame().set_index("analysis")
    assert frame["lacks"][list(OF_STREAM)].nunique() == 1
    text = " ".join(str(found).split())
    assert text.count(frame["lacks"]["probe"]) == 1
    assert ", ".join(OF_STREAM) in text
    for kind in ("grouped", "heads"):
        every = str(check(hooked(kind), n_prompts=32))
        assert not re.search(r"ModuleHooks|HookedPredictor|_[A-Z]\w+", every)


def test_settings_that_predictions_leave_open_come_first(tmp_path: Path):
    """A module of one length: 1/L is a fixed number there. A file is proven by predictions of one length as well."""
    module = one_length(with_circuits(Own(4), [1.0], [0.8]))
    found = check(module, task=TASK, n_prompts=32)
    assert found.settings["how"][0] == "open"
    assert "linear/L" in found.settings["value"][0]
    assert "Open: " in str(found)
    assert statuses(found)["weights by name"] == "proven"


def test_a_module_whose_weights_are_not_proven_names_the_number_of_readings():
    found = check(random(Own(4, bent=True)), task=TASK, n_prompts=32)
    assert "weights by name" not in statuses(found)
    lacks = found.to_frame().set_index("analysis")["lacks"]["circuits"]
    assert re.search(r"\d+ readings tried, at most \d+", lacks)


def test_a_recurrence_needs_its_number_of_heads_and_its_read_out_is_no_output_of_heads():
    class Recurrence(nn.Module):
        def __init__(self):
            super().__init__()
            parts = (nn.Linear(4, 4, bias=False) for _ in "qkvo")
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = parts
            self.out = nn.Linear(4, 1)

        def forward(self, x):
            q, k, v = self.q_proj(x), self.k_proj(x) / 4, self.v_proj(x)
            state, rows = x.new_zeros(len(x), 4, 4), []
            for t in range(x.shape[1]):
                error = v[:, t] - (state @ k[:, t, :, None])[..., 0]
                state = state + error[..., None] * k[:, t, None]
                rows.append((state @ q[:, t, :, None])[..., 0])
            return self.out(self.o_proj(torch.stack(rows, 1)))

    module = random(Recurrence())
    with as_for_users(), pytest.raises(ValueError, match=r"heads must be given: .*o_proj.*heads="):
        check(module, task=TASK)
    found = check(hook_module(module, task=TASK, n_heads=1), n_prompts=32)
    assert "1 layer of 1 head" in found.model
    assert "o_proj" in " ".join(found.settings["value"])


MINE = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(layer, nn.Linear(4, 1))


model = build()


def seven():
    return 7


def crashes():
    raise KeyError("no config")


def needs(size):
    return build()


def without_heads():
    return nn.Linear(4, 1)
"""


REFUSED = {
    "crashes": ("mine_to_check:crashes", "KeyError", "no config"),
    "needs": ("mine_to_check:needs", "takes an argument"),
    "without_heads": ("mine_to_check:without_heads", "outputs", "compare_learners"),
}
"""Names in the file, and words of their refusals."""


def test_the_command_checks_modules_of_the_folder_and_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine_to_check.py").write_text(MINE)
    (tmp_path / "task.json").write_text('{"d_x": 3, "context_length": 6}')
    monkeypatch.chdir(tmp_path)
    stated = ("--task", "task.json", "--n-prompts", 32)
    shown = [run("check", f"mine_to_check:{x}", *stated).done().out for x in ("model", "build")]
    assert shown[0] == shown[1].replace("mine_to_check:build", "mine_to_check:model")
    assert "1 layer of 2 heads" in shown[0]
    document = run("check", "mine_to_check:build", *stated, "--json").done().document
    how = {each["setting"]: each["how"] for each in document["settings"]}
    assert how["context_length"] == "stated"
    assert {each["analysis"] for each in document["analyses"]} == set(ANALYSES)
    assert document["loss"]["ridge"] < document["loss"]["zero"]
    run("check", "mine_to_check:seven").assert_refused(
        "mine_to_check:seven", "torch.nn.Module", "int"
    )
    for name, words in REFUSED.items():
        run("check", f"mine_to_check:{name}", *stated).assert_refused(*words)
    run("check", "os:path").assert_refused("os:path", "got module")
    run("check", "mine_to_check:none").assert_refused("mine_to_check", "'none'")
    run("check", "nothing.pt").assert_refused("nothing.pt", "does not exist")
    one = json.loads(run("check", SHIPPED, "--n-prompts", 32, "--json").done().out)
    assert "softmax-h2-s0" in one["model"]
