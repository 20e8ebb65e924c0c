"""Pruning: rules, the cost on prompts that did not choose, new read-outs, and the smaller checkpoint that predicts as the
masked model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp import ablate, load
from mechinterp.analysis.ablation import pruned
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.pruned import pruned_weights, save_pruned
from mechinterp.analysis.ablation.pruning import RULES, prune
from mechinterp.analysis.ablation.pruning_rules import best_head_first, best_head_later, masked_by
from mechinterp.analysis.probing.linear import cross_validated_probe
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.run.predictor import predictor_of
from tests.analysis.one_pair import layer_of, prompts_of
from tests.conftest import refused
from tests.deep_models import WIDE, random_gpt2, random_model, wide_checkpoint

TASK = TaskConfig(d_x=4, context_length=9)


@pytest.fixture
def many() -> Prompts:
    generator = generator_for(0, "eval", 1)
    return draw_prompts(TASK, 80, generator=generator, dtype=torch.float64)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return wide_checkpoint(tmp_path / "full")


def test_rules():
    rise = np.array([[0.1, 0.3], [2.0, 1.0], [-1.0, -2.0]])
    kept = {name: rule(rise).tolist() for name, rule in RULES.items()}
    assert kept == {
        "best-later": [[True, True], [True, False], [True, False]],
        "least-later": [[True, True], [False, True], [False, True]],
        "best-first": [[False, True], [True, True], [True, True]],
    }
    # A tie goes to the lower number.
    assert best_head_later(np.zeros((2, 3)))[1].tolist() == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: random_model(**WIDE), random_gpt2])
def test_heads_are_chosen_on_one_half_and_measured_on_the_other(make, many):
    model = make()
    found = prune(model, many, refit=True)
    chosen_on, measured = many[:40], many[40:]
    shape = found.kept.shape
    errors = masked_errors(model, chosen_on, [[], *([head] for head in np.ndindex(shape))])
    rises = (errors[:, 1:] - errors[:, :1]).mean(0).reshape(shape)
    np.testing.assert_allclose(found.rise, rises, rtol=1e-9)
    assert np.array_equal(found.kept, best_head_later(rises))
    gone = masked_by(found.kept)
    full, masked = masked_errors(model, measured, [[], gone]).T
    assert found.full_risk == pytest.approx(full.mean(), rel=1e-12)
    assert found.risk == pytest.approx(masked.mean(), rel=1e-12)
    assert found.median_rise == pytest.approx(np.median(masked - full), rel=1e-9)
    expected = tuple(map(float, ratio_and_sem(masked, full)))
    assert (found.ratio, found.ratio_sem) == pytest.approx(expected, rel=1e-9)
    # By hand: a ridge regression on the stream of the masked model, cross-validated.
    again = []
    for heads in (gone, []):
        stream = predictor_of(model).streams(measured, heads=heads)[-1, :, 0]
        (fitted,) = cross_validated_probe(stream.numpy(force=True), measured.y_query.numpy())
        again.append(np.square(fitted.prediction - measured.y_query_clean.numpy()).mean(1))
    assert found.refit.risk == pytest.approx(again[0].mean(), rel=1e-9)
    assert found.refit.full_risk == pytest.approx(again[1].mean(), rel=1e-9)
    assert found.refit.ratio == pytest.approx(again[0].mean() / full.mean(), rel=1e-9)
    assert found.refit.ratio_sem >= ratio_and_sem(again[0], full)[1] * (1 - 1e-9)
    as_it_is, refit = (trace.y.tolist() for trace in found.plot().data)
    assert as_it_is == [found.full_risk, found.risk]
    assert refit == [found.refit.full_risk, found.refit.risk]
    assert prune(model, many).refit is None


@pytest.mark.slow
def test_a_pruned_model_is_a_smaller_checkpoint(checkpoint, many, tmp_path):
    kept = np.zeros((3, 4), dtype=bool)
    kept[0, [1, 3]] = kept[2, 2] = True  # no head at all in layer 1
    gone = [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]
    saved = save_pruned(checkpoint, kept, tmp_path / "pruned", prompts=many)
    assert saved.config.model.n_heads == saved.weights.n_heads == 2
    assert saved.weights.heads_per_layer == ((0, 1), (), (0,))
    assert saved.step == 5
    assert saved.origin == {"pruned_from": "full", "kept_heads": [[1, 3], [], [2]]}
    saved.save_pretrained(tmp_path / "again")
    assert load(tmp_path / "again").origin == saved.origin
    masked = predictor_of(checkpoint).run(many, [gone])[0]
    torch.testing.assert_close(saved.model.predict(many), masked, rtol=1e-11, atol=1e-13)
    with refused("already", error=CheckpointError):
        save_pruned(checkpoint, kept, tmp_path / "pruned", prompts=many)


def test_a_saved_model_that_predicts_otherwise_is_refused(checkpoint, many, tmp_path, monkeypatch):
    def wrong(weights, kept):
        return pruned_weights(weights, ~kept)

    monkeypatch.setattr(pruned, "pruned_weights", wrong)
    with refused("masked model", "1e-05"):
        save_pruned(checkpoint, np.eye(3, 4, dtype=bool), tmp_path / "pruned", prompts=many)


def test_a_rule_by_its_name(many):
    model = random_model(**WIDE)
    named, own = prune(model, many, rule="best-first"), prune(model, many, rule=best_head_first)
    assert named.to_document()["heads_per_layer"].tolist() == [1, 4, 4]
    assert named.ratio == own.ratio
    assert named.cost_frame()["risk"].tolist() == [named.full_risk, named.risk]
    assert named.to_frame()["kept"].tolist() == named.kept.ravel().tolist()
    assert named.plot().layout.yaxis.type is None
    # A rule may cost a thousand times another.
    assert replace(named, risk=1000 * named.risk).plot().layout.yaxis.type == "log"
    for rule, words in (
        ("all", ["rule", "best-later", "'all'"]),
        (lambda rise: np.zeros(rise.shape, dtype=bool), ["12 heads", "none"]),
        (lambda rise: rise, ["boolean", "(3, 4)", "float64"]),
    ):
        with refused(*words):
            prune(model, many, rule=rule)
    with refused("several layers", "one"):
        prune(random_model(1, 2, **WIDE), many)


@pytest.mark.slow
def test_the_pruned_model_is_saved(checkpoint, many, tmp_path):
    found = prune(checkpoint, many, out=tmp_path / "pruned")
    assert found.saved == str(tmp_path / "pruned")
    assert [len(heads) for heads in load(found.saved).weights.heads_per_layer] == [4, 1, 1]
    with refused("already", error=CheckpointError):
        prune(checkpoint, many, out=tmp_path / "pruned")
    with refused("checkpoint", "ICLTransformer"):
        prune(checkpoint.model, many, out=tmp_path / "other")


def test_a_rise_that_few_prompts_carry_is_read_by_its_median():
    """Of 200 prompts two, about the first coordinate, hang on head 0, one in each half."""
    model = layer_of([[30.0, 0.1], [0.0, 1.0]])
    prompts = prompts_of(model, ([0] + [1] * 99) * 2, torch.linspace(0.5, 1, 200).double()[:, None])
    found = ablate(model, prompts, what="heads")
    assert found.carried_by_few.tolist() == [[True, False]]
    assert found.grid("median_rise")[0, 0] < found.rise[0, 0] / 10
    assert list(found.to_frame())[3] == "median_rise"
    few = prune(model, prompts, rule=lambda rise: np.array([[False, True]]))
    assert few.carried_by_few
    clear = prune(model, prompts, rule=lambda rise: np.array([[True, False]]))
    assert not clear.carried_by_few
