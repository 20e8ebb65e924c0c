"""Loss at every position: one pass gives the mean of the losses at each length, and its gradient."""

from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import torch
from torch import Tensor

from analyses.lib.deep_pack import DeepPack
from mechinterp.config import ExperimentConfig, TaskConfig, TrainConfig, override
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.run.general import predictions
from mechinterp.presets import preset
from mechinterp.training.batches import narrowed
from mechinterp.training.general.step import loss_and_gradients
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from tests.conftest import refused
from tests.training.test_trainer import finished

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=5, noise_var=0.25, n_tasks=4),
    model=replace(preset("pool-gpt2").model, n_layers=2, d_model=8, d_head=4, d_mlp=16),
    train=TrainConfig(
        steps=6, batch_size=8, log_every=3, n_eval_prompts=24, loss="every", snapshot_every=2
    ),
)
ROTARY = override(CONFIG, "model.rotary_dim=4", "model.n_positions=null", "model.norm=after")


def at_every_length(weights: object, prompts: Prompts) -> Tensor:
    """Loss after 0 to L pairs, each from a pass over the cut prompts."""
    cut = [prompts.prefix(length) for length in range(prompts.x.shape[1] + 1)]
    errors = [predictions(weights, each) - each.y_query for each in cut]
    return torch.stack([error.square().mean() for error in errors])


@pytest.mark.parametrize("config", [CONFIG, ROTARY])
@pytest.mark.parametrize("first", [0, 1])
def test_the_loss_is_the_mean_over_lengths_and_its_gradient_that_of_autograd(config, first):
    weights = initial_deep_weights(config).to(torch.float64)
    prompts = draw_prompts(config.task, 16, dtype=torch.float64)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.tensors.items()}
    each = at_every_length(weights.with_tensors(leaves), prompts)
    expected = torch.autograd.grad(each[first:].mean(), list(leaves.values()))
    loss, gradients = loss_and_gradients(weights, prompts, first_counted=first)
    torch.testing.assert_close(loss, each[first:].mean().detach(), rtol=1e-12, atol=0)
    for gradient, other in zip(gradients.tensors.values(), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)


def test_the_history_has_the_loss_after_each_number_of_pairs():
    run = DeepRun({"m": override(CONFIG, "train.first_position=false")})
    run.advance()
    history = run.results()["m"].history.drop_duplicates("step")
    columns = [f"eval_loss_at_{n}" for n in range(6)]
    assert history["eval_loss"].to_numpy() == pytest.approx(history[columns[1:]].mean(axis=1))
    prompts = draw_prompts(CONFIG.task, 24, generator=generator_for(0, "eval", 0))
    with torch.no_grad():
        each = at_every_length(run.weights, prompts)
    assert history[columns].iloc[-1].tolist() == pytest.approx(each.tolist(), rel=1e-6)


@pytest.mark.parametrize(("warm_up", "share"), [(None, 0.3), (20, 0.2)])
def test_one_cycle_is_that_of_torch(warm_up: int | None, share: float):
    train = TrainConfig(steps=100, learning_rate=0.5, schedule="one_cycle", warm_up=warm_up)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    torchs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=100, pct_start=share, cycle_momentum=False
    )
    for step in range(100):
        assert train.step_size(step) == pytest.approx(torchs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        torchs.step()


def test_a_triangle_rises_to_its_top_and_falls_to_0():
    train = TrainConfig(steps=10, learning_rate=2.0, schedule="triangle", warm_up=4)
    assert [train.step_size(step) for step in (0, 2, 4, 7, 10)] == [0, 1, 2, 1, 0]


def test_weight_decay_is_that_of_adamw():
    config = override(CONFIG, "train.weight_decay=0.1", "train.learning_rate=0.01")
    run = DeepRun({"m": config})
    flat = run.flat.clone().requires_grad_()
    adam = torch.optim.AdamW([flat], lr=0.01, weight_decay=0.1)
    for step in range(3):
        run.update(step)
        flat.grad = run.gradient.clone()
        adam.step()
    torch.testing.assert_close(run.flat, flat.detach(), rtol=1e-5, atol=1e-8)


def test_a_curriculum_adds_a_coordinate_and_two_pairs_at_each_stage():
    stages = ("train.curriculum_every=2", "train.curriculum_d_x=1", "train.curriculum_length=2")
    run = DeepRun({"m": override(CONFIG, *stages)})
    for step, d_x, length in ((0, 1, 2), (1, 1, 2), (2, 2, 4), (4, 3, 5)):
        ((prompts,),) = run._prompts("train", step, 8)
        assert prompts.x.shape[1] == length
        assert not prompts.x[..., d_x:].any()
        assert not prompts.x_query[..., d_x:].any()
        assert prompts.x[..., d_x - 1].any()
    ((evaluated,),) = run._prompts("eval", 0, 8)
    assert evaluated.x.shape[1] == 5
    assert evaluated.x[..., 2].any()


def test_narrow_prompts_have_the_same_noise():
    task = replace(CONFIG.task, n_tasks=None)
    wide = draw_prompts(task, 8, dtype=torch.float64)
    narrow = narrowed(wide, 2)
    for prompts in (wide, narrow):
        noise = prompts.y - prompts.x @ prompts.beta
        torch.testing.assert_close(noise, wide.y - wide.x @ wide.beta)
    clean = narrow.x_query[:, None] @ narrow.beta
    torch.testing.assert_close(narrow.y_query_clean, clean[:, 0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("model.layout=pairs",), ("train.loss", "layout", "'every'")),
        (("train.shortest_context=2",), ("train.shortest_context", "every")),
        (("train.loss=query", "train.first_position=false"), ("first_position", "every")),
        (("train.curriculum_every=1", "train.curriculum_d_x=4"), ("curriculum_d_x", 3)),
        (("train.schedule=triangle", "train.warm_up=6"), ("train.warm_up", 6)),
        (("train.schedule=linear",), ("train.schedule", "triangle", "linear")),
    ],
)
def test_what_does_not_fit_is_refused(settings: tuple[str, ...], words: tuple):
    with refused(*words):
        override(CONFIG, *settings)


@pytest.mark.slow
def test_models_of_a_pack_learn_as_they_do_alone():
    models = {
        f"{n_tasks}-{seed}": override(CONFIG, f"seed={seed}", f"task.n_tasks={n_tasks}")
        for n_tasks, seed in product((2, 4), (0, 1))
    }
    together = finished(DeepPack(models)).results()
    for name, config in models.items():
        alone = finished(DeepRun({name: config})).results()[name]
        frames = together[name].history, alone.history
        pd.testing.assert_frame_equal(*frames, check_dtype=False, rtol=1e-4, atol=1e-5)
        assert together[name].snapshots.keys() == alone.snapshots.keys()
