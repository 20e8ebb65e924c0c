"""A context-only model trains, stops and resumes with the same bits, and is what its gradients say."""

from dataclasses import replace

import numpy as np
import torch

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.run.general import predict_deep
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from tests.conftest import assert_same

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=8, sparsity=1, nonzeros="signs"),
    model=ModelConfig(n_layers=2, n_heads=2, d_model=6, score="linear/L", context_only=True),
    train=TrainConfig(
        steps=20,
        batch_size=16,
        log_every=10,
        snapshot_every=5,
        n_eval_prompts=40,
        data_seed=3,
        shortest_context=2,
        schedule="cosine",
        clip_norm=1.0,
        warm_up=2,
    ),
    seed=2,
)


def test_initial_weights_are_a_function_of_config_and_seed():
    first, again = (initial_deep_weights(CONFIG) for _ in range(2))
    assert_same(first, again)
    other = initial_deep_weights(replace(CONFIG, seed=3))
    assert not torch.equal(first.W_Q, other.W_Q)
    assert (first.model, first.d_x, first.d_y) == (CONFIG.model, 3, 1)
    assert first.scale == 3**-0.5
    # Uniform in +-1/sqrt(fan_in), W_in of fan_in d_x + d_y, the others of 6.
    tensors = dict(first.tensors)
    assert 0.45 < tensors.pop("W_in").abs().max() <= 0.5
    assert all(0.37 < tensor.abs().max() <= 6**-0.5 for tensor in tensors.values())


def test_one_update_is_adam_on_the_clipped_gradient_at_the_step_size_of_warm_up_and_cosine():
    run, before = DeepRun({"m": CONFIG}), initial_deep_weights(CONFIG)
    for step in range(3):
        run.update(step)
    flat = torch.cat([t.flatten() for t in before.tensors.values()]).requires_grad_()
    adam = torch.optim.Adam([flat], lr=1e-3)
    for step in range(3):
        generator = generator_for(3, "train", step)
        length = int(torch.randint(2, 9, (), generator=generator))
        prompts = sample_prompts(CONFIG.task, 16, generator=generator, context_length=length)
        cut = flat.split([t.numel() for t in before.tensors.values()])
        named = zip(before.tensors.items(), cut, strict=True)
        weights = before.with_tensors({name: part.view(t.shape) for (name, t), part in named})
        loss = (predict_deep(weights, prompts) - prompts.y_query).square().mean()
        (gradient,) = torch.autograd.grad(loss, [flat])
        flat.grad = gradient / max(1.0, gradient.norm().item())
        adam.param_groups[0]["lr"] = 1e-3 * (0.5, 1, 1)[step] * (1 + np.cos(np.pi * step / 20)) / 2
        adam.step()
    torch.testing.assert_close(run.flat, flat, rtol=1e-4, atol=1e-7)
