"""Pruning: rules, choices and their errors, the smaller checkpoint that predicts as the masked model, and its further training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.analysis.ablation import pruning
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pruning import (
    RULES,
    SPLITS,
    Choices,
    best_head_first,
    best_head_later,
    fine_tune,
    masked_by,
    prune,
    pruned_weights,
    save_pruned,
)
from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.analysis.probing.linear import cross_validated
from mechinterp.analysis.stats import random_halves, ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.config import TaskConfig, TrainConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.general import predict_deep
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import refused
from tests.deep_models import WIDE, random_gpt2, random_model, wide_checkpoint

TASK = TaskConfig(d_x=4, context_length=9)


@pytest.fixture
def many() -> Prompts:
    generator = generator_for(0, "eval", 1)
    return draw_prompts(TASK, 80, generator=generator, dtype=torch.float64)


TRAIN = TrainConfig(
    batch_size=64, learning_rate=1e-2, shortest_context=5, schedule="cosine", clip_norm=0.5
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return wide_checkpoint(tmp_path / "full", TRAIN)


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
def test_risks_are_those_of_the_masked_model(make, many):
    model = make()
    found = prune(model, many)
    shape = found.kept.shape
    errors = masked_errors(model, many, [[], *([head] for head in np.ndindex(shape))])
    rises = (errors[:, 1:] - errors[:, :1]).reshape(-1, *shape)
    np.testing.assert_allclose(found.rise, rises.mean(0), rtol=1e-9)
    assert np.array_equal(found.kept, best_head_later(found.rise))
    # One half of each halving at a time; each prompt is measured by one choice of each.
    crossed, refitted, kept = np.zeros(80), np.zeros(80), []
    for half in random_halves(80, SPLITS):
        kept.append(best_head_later(rises[half].mean(0)))
        gone = masked_by(kept[-1])
        crossed[~half] += masked_errors(model, many, [gone])[~half, 0] / SPLITS
        # By hand: a ridge regression on the stream of the masked model, cross-validated.
        stream = predictor_of(model).streams(many, heads=gone)[-1, :, 0]
        (fitted,) = cross_validated(stream.numpy(force=True), many.y_query.numpy())
        errors = np.square(fitted.prediction - many.y_query_clean.numpy()).mean(1)
        refitted[~half] += errors[~half] / SPLITS
    np.testing.assert_allclose(found.chosen, np.mean(kept, axis=0), rtol=1e-12)
    full = masked_errors(model, many, [[]])[:, 0]
    assert found.full_risk == pytest.approx(full.mean(), rel=1e-12)
    assert found.risk == pytest.approx(crossed.mean(), rel=1e-9)
    assert found.ratio == pytest.approx(crossed.mean() / full.mean(), rel=1e-9)
    assert found.refit_risk == pytest.approx(refitted.mean(), rel=1e-9)
    assert found.refit_ratio == pytest.approx(refitted.mean() / full.mean(), rel=1e-9)
    within = [float(ratio_and_sem(errors, full)[1]) for errors in (crossed, refitted)]
    assert found.ratio_sem >= within[0] * (1 - 1e-9)
    assert found.refit_ratio_sem >= within[1] * (1 - 1e-9)
    assert found.refit_risk < found.risk
    as_it_is, refit = (trace.y.tolist() for trace in found.plot().data)
    assert as_it_is == [found.full_risk, found.risk]
    assert refit == [found.full_refit_risk, found.refit_risk]


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

    monkeypatch.setattr(pruning, "pruned_weights", wrong)
    with refused("masked model", "1e-05"):
        save_pruned(checkpoint, np.eye(3, 4, dtype=bool), tmp_path / "pruned", prompts=many)


def test_a_rule_by_its_name(many):
    model = random_model(**WIDE)
    named, own = prune(model, many, rule="best-first"), prune(model, many, rule=best_head_first)
    assert named.to_document()["heads_per_layer"].tolist() == [1, 4, 4]
    assert named.ratio == own.ratio
    assert named.cost_frame()["risk"].tolist() == [named.full_risk, named.risk]
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
def test_the_pruned_model_is_saved_and_trained_further(checkpoint, many, tmp_path):
    found = prune(checkpoint, many, out=tmp_path / "pruned")
    assert found.saved == str(tmp_path / "pruned")
    assert [len(heads) for heads in load(found.saved).weights.heads_per_layer] == [4, 1, 1]
    tuned = prune(checkpoint, many, n_prompts=60, fine_tune_steps=8, out=tmp_path / "tuned", seed=2)
    # Measured on other prompts than those that the heads are chosen on.
    others = draw_prompts(TASK, 60, seed=3, dtype=torch.float64)
    by_hand = fine_tune(checkpoint, tuned.kept, others, steps=8)
    np.testing.assert_array_equal(tuned.tuned.risk, by_hand.risk)
    trained = load(tmp_path / "tuned")
    assert (trained.step, trained.origin["fine_tuned_steps"]) == (checkpoint.step + 8, 8)
    with refused("already", error=CheckpointError):
        prune(checkpoint, many, out=tmp_path / "tuned")
    with refused("checkpoint", "ICLTransformer"):
        prune(checkpoint.model, many, fine_tune_steps=1)


ONE_PAIR = TaskConfig(d_x=2, context_length=1)
HALF = 13
"""Prompts of each kind. Odd: no half of the prompts has as many of one kind as of the other."""
GAMMA, RHO = 0.5, 1.0
KEPT_A, KEPT_B = np.array([2.25, 2.25]), np.array([6.25, 0.25])
"""Errors on prompts of the first and of the second kind with the first, or the second, head alone."""


def layer_of(omega: list[list[float]]) -> ICLTransformer:
    """One layer of linear attention on one pair with y = 1, whose heads add these on prompts about either coordinate."""
    weights = diagonal_heads(omega, [1.0] * len(omega), d_x=2).with_model(score="linear")
    return ICLTransformer.from_weights(weights, task=ONE_PAIR)


def three_heads(*, second: float = 1.0, third: float = GAMMA) -> ICLTransformer:
    """On prompts about the first coordinate head 0 adds 1 to the prediction and head 2 `third`; on those about the
    second coordinate head 1 adds `second`, and head 2 takes `third` away."""
    return layer_of([[1.0, 0.0], [0.0, second], [third, -third]])


def prompts_of(
    model: ICLTransformer, about: list[int], above: float | torch.Tensor = RHO
) -> Prompts:
    """Prompts about these coordinates, whose targets lie so far above what the model predicts.

    No two are equal: each has its own factor on x, a power of 2, and the inverse on y, so that the products are the same.
    """
    x = torch.eye(2, dtype=torch.float64)[about]
    factor = 2.0 ** torch.arange(len(x), dtype=torch.float64)[:, None, None]
    zero = torch.zeros(len(x), 1).double()
    prompts = Prompts(
        factor * x[:, None], 1 / factor, x, zero, zero, torch.zeros(len(x), 2, 1).double()
    )
    target = model.predict(prompts) + above
    return replace(prompts, y_query=target, y_query_clean=target)


def test_of_two_equal_heads_each_is_chosen_half_of_the_time():
    model = three_heads()
    prompts = prompts_of(model, [0, 1] * HALF)
    found = prune(model, prompts, rule=best_head_first)
    # The half with more prompts of the first kind keeps head 0, the other one head 1.
    assert found.chosen.tolist() == [[0.5, 0.5, 0.0]]
    kind = np.arange(2 * HALF) % 2
    errors = np.zeros(2 * HALF)
    for half in random_halves(2 * HALF, SPLITS):
        alone = KEPT_A if (kind[half] == 0).sum() > HALF / 2 else KEPT_B
        errors += ~half * alone[kind] / SPLITS
    assert found.full_risk == pytest.approx(RHO**2, rel=1e-12)
    assert found.ratio == pytest.approx(errors.mean(), rel=1e-12)
    # Between the heads on all prompts: half of the difference of their risks, squared, is the variance V; V / 2 counts.
    between = (KEPT_B.mean() - KEPT_A.mean()) / 2 / 2**0.5
    within = errors.std(ddof=1) / (2 * HALF) ** 0.5
    assert found.ratio_sem == pytest.approx(np.hypot(within, between), rel=1e-12)
    assert found.risk_sem == pytest.approx(np.hypot(within, between), rel=1e-12)
    assert found.plot_chosen().data[0].z.tolist() == [[0.5, 0.5, 0.0]]


def test_a_clear_choice_is_that_of_all_prompts_and_adds_nothing_to_the_error():
    model = three_heads(second=0.1, third=0.05)
    prompts = prompts_of(model, [0, 1] * HALF)
    found = prune(model, prompts, rule=best_head_first)
    assert found.chosen.tolist() == found.kept.tolist() == [[True, False, False]]
    errors = masked_errors(model, prompts, [[], [(0, 1), (0, 2)]])
    ratio, sem = ratio_and_sem(errors[:, 1], errors[:, 0])
    assert (found.ratio, found.ratio_sem) == (float(ratio), float(sem))


def test_an_error_is_that_of_choices_that_a_prompt_had_no_part_in():
    # Two choices of four prompts; each was made on two of them.
    kept = np.array([[[True, False]], [[False, True]]])
    weight = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    choices = Choices(kept, np.array([0.5, 0.5]), weight)
    errors = np.array([[2.0, 2.0, 99.0, 99.0], [99.0, 99.0, 4.0, 4.0]])
    assert choices.crossed(errors).tolist() == [2.0, 2.0, 4.0, 4.0]
    assert choices.ratio(errors, np.ones(4))[0] == 3.0
    flat = np.array([[2.0] * 4, [4.0] * 4])
    # SEM of 2, 2, 4, 4, half of the variance 1 between the choices, and the mean error 2 of the fits.
    assert choices.ratio(flat, np.ones(4))[1] == pytest.approx((1 / 3 + 1 / 2) ** 0.5, rel=1e-12)
    expected = (1 / 3 + 1 / 2 + 4) ** 0.5
    fits = np.array([1.0, 3.0])
    assert choices.ratio(flat, np.ones(4), fits)[1] == pytest.approx(expected, rel=1e-12)
    assert choices.ratio(flat, np.full(4, 2.0), fits) == pytest.approx((1.5, expected / 2))


def test_halves_are_halves():
    halves = random_halves(9, 3)
    assert halves.sum(1).tolist() == [4, 5] * 3
    assert (halves[::2] ^ halves[1::2]).all()
    assert len({tuple(half) for half in halves}) == 6
    with refused(4, "prompts", 3):
        random_halves(3, 1)
    with refused("splits", 1, 0):
        random_halves(4, 0)


def test_a_rise_that_few_prompts_carry_is_read_by_its_median():
    """Of 200 prompts two, about the first coordinate, hang on head 0."""
    model = layer_of([[30.0, 0.1], [0.0, 1.0]])
    prompts = prompts_of(model, [0, 0] + [1] * 198, torch.linspace(0.5, 1, 200).double()[:, None])
    found = ablate_heads(model, prompts)
    assert found.carried_by_few.tolist() == [[True, False]]
    assert f"L0H0 median {found.median_rise[0, 0]:+.3g}, mean +" in repr(found)
    few = prune(model, prompts, rule=lambda rise: np.array([[False, True]]))
    assert few.carried_by_few
    clear = prune(model, prompts, rule=lambda rise: np.array([[True, False]]))
    assert not clear.carried_by_few


KEPT = np.array([[True] * 4, [True] + [False] * 3, [True] * 4])


@pytest.fixture
def fresh():
    return draw_prompts(TASK, 500, seed=1, dtype=torch.float64)


def by_hand(weights, steps: int):
    """Adam on prompts of lengths 5 to 9, gradients cut to norm 0.5, the step size along half a cosine."""
    trained = {name: t.detach().clone().requires_grad_() for name, t in weights.tensors.items()}
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
    for step in range(steps):
        generator = generator_for(1000, "train", step)
        length = int(torch.randint(5, 10, (), generator=generator))
        drawn = draw_prompts(
            TASK, 64, generator=generator, context_length=length, dtype=torch.float64
        )
        optimizer.zero_grad()
        error = predict_deep(weights.with_tensors(trained), drawn) - drawn.y_query
        error.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + np.cos(np.pi * step / steps)) / 2
        optimizer.step()
    return weights.with_tensors({name: tensor.detach() for name, tensor in trained.items()})


def risks(weights, prompts):
    return (predict_deep(weights, prompts) - prompts.y_query_clean).square().mean(1).numpy()


@pytest.mark.slow
def test_it_is_training_by_hand(checkpoint, fresh):
    found = fine_tune(checkpoint, KEPT, fresh, steps=20)
    assert found.step.tolist() == [0, 5, 10, 15, 20]
    starts = [pruned_weights(checkpoint.weights, KEPT), checkpoint.weights]
    few, full = (by_hand(start, 20) for start in starts)
    for name, tensor in few.tensors.items():
        torch.testing.assert_close(found.weights.tensors[name], tensor, rtol=1e-7, atol=1e-9)
    expected = [risks(weights, fresh) for weights in (starts[0], few, starts[1], full)]
    ends = found.risk[:, [0, -1]].ravel()
    np.testing.assert_allclose(ends, np.mean(expected, axis=1), rtol=1e-6)
    np.testing.assert_allclose(found.ratio[:, -1], found.risk[:, -1] / found.risk[1, 0], rtol=1e-9)
    assert (found.ratio[1, 0], found.ratio_sem[1, 0]) == (1, 0)
    masked = masked_errors(checkpoint.model, fresh, [[(1, 1), (1, 2), (1, 3)]])
    assert found.risk[0, 0] == pytest.approx(masked.mean(), rel=1e-9)


def test_what_is_refused(checkpoint, fresh):
    with refused("train.steps", 0):
        fine_tune(checkpoint, KEPT, fresh, steps=0)
    with refused("12 heads", "none"):
        fine_tune(checkpoint, ~np.ones((3, 4), dtype=bool), fresh)
