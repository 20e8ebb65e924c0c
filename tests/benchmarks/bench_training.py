"""Training: the step of packs of several sizes, and sampling alone, against the plain loop."""

from collections.abc import Callable

import plain
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mechinterp.config import override
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.presets import preset
from mechinterp.training.general.trainer import DeepRun
from mechinterp.training.normal import normal_numbers
from mechinterp.training.one_layer import step as pack_module
from mechinterp.training.one_layer.step import Pack

STEPS = 100
SHIPPED = [1] * 3 + [2] * 12 + [3] * 4 + [4] * 4 + [8] * 3


def pack_of(head_counts: list[int]) -> Callable[[], None]:
    """Trains a pack for STEPS steps, a row of its history among them."""
    base = override(preset("softmax-h2"), f"train.log_every={STEPS}", "train.n_eval_prompts=256")
    models = {
        f"{seed}": override(base, f"model.n_heads={n_heads}", f"seed={seed}")
        for seed, n_heads in enumerate(head_counts)
    }
    return Pack(models).advance


def counted(n_models: int) -> str:
    return "1 model" if n_models == 1 else f"{n_models} models"


@pytest.mark.parametrize("n_heads", [2, 8])
@pytest.mark.parametrize("n_models", [1, 16, 64])
def test_step(versus, n_models: int, n_heads: int):
    loop = plain.training(n_heads)
    name = f"{STEPS} steps, {counted(n_models)} of {n_heads} heads"
    versus(name, pack_of([n_heads] * n_models), lambda: loop(STEPS), work=n_models)


def test_step_of_the_shipped_models(versus):
    loop = plain.training(2)
    name = f"{STEPS} steps, the 26 shipped models (1 to 8 heads; plain: 2)"
    versus(name, pack_of(SHIPPED), lambda: loop(STEPS), work=len(SHIPPED))


@pytest.mark.parametrize("n_models", [1, 64])
def test_step_by_tensor_operations(versus, monkeypatch: pytest.MonkeyPatch, n_models: int):
    monkeypatch.setattr(pack_module, "uses_kernel", lambda weights: False)
    loop = plain.training(2)
    name = f"the same without the compiled step, {counted(n_models)} of 2 heads"
    versus(name, pack_of([2] * n_models), lambda: loop(STEPS), work=n_models)


FEW = 10


def steps_of(*settings: str) -> Callable[[], None]:
    """FEW steps of GPT-2 on a pool."""
    run = DeepRun({"": override(preset("pool-gpt2"), "train.n_eval_prompts=16", *settings)})

    def steps() -> None:
        for step in range(FEW):
            run.update(step)

    return steps


def test_step_at_every_position_against_the_query_alone(versus):
    name = f"{FEW} steps of pool-gpt2 at every position (plain: at the query, 8 pairs)"
    versus(name, steps_of(), steps_of("train.loss=query"))


def test_step_at_every_position_against_hugging_face(versus):
    name = f"{FEW} steps of pool-gpt2 at every position (plain: Hugging Face's GPT2Model)"
    versus(name, steps_of(), plain.gpt2_training(preset("pool-gpt2"), FEW))


BLOCKS = ("norm=before", "final_norm=true", "d_mlp=256", "activation=gelu", "biases=true")


@pytest.mark.parametrize("more", [(), BLOCKS], ids=["attention", "norm and MLP"])
@pytest.mark.parametrize("score", ["linear/L", "relu/L", "softmax"])
def test_step_of_a_stack(versus, score: str, more: tuple[str, ...]):
    settings = [f"model.{setting}" for setting in (f"score={score}", *more)]
    config = override(preset("sparse-h8"), *settings)
    run, model = DeepRun({"": config}), config.model
    seeded = [generator_for(config.train.data_seed, "train", step) for step in range(STEPS)]
    longest = config.task.context_length
    lengths = [run._length(step, generator, longest) for step, generator in enumerate(seeded)]
    loop = plain.deep_training(config, lengths)

    def ours() -> None:
        for step in range(STEPS):
            run.update(step)

    name = f"{STEPS} steps, {model.n_layers} layers of {model.n_heads} heads, {score} scores"
    name += ", norm and MLP" if more else ""
    n_rows = config.train.batch_size * (1 + sum(lengths) // STEPS)
    versus(name, ours, loop, rounds=5, machine=bare_products(loop, n_rows, config.d_model))


def bare_products(loop: Callable[[], None], n_rows: int, width: int) -> Callable[[], None]:
    """As many operations as the matrix products of a loop have, all of them products of [n_rows, width, width]."""
    with FlopCounterMode(display=False) as counter:
        loop()
    tokens, matrix = torch.randn(n_rows, width), torch.randn(width, width)
    out = torch.empty(n_rows, width)

    def multiply() -> None:
        for _ in range(round(counter.get_total_flops() / (2 * n_rows * width**2))):
            torch.mm(tokens, matrix, out=out)

    return multiply


@pytest.mark.parametrize("name", ["gla-h1", "gated-delta-h1", "mesa-h1"])
def test_step_of_a_recurrent_layer(versus, name: str):
    config = override(preset(name), "train.n_eval_prompts=16")
    run = DeepRun({"": config})

    def ours() -> None:
        for step in range(STEPS):
            run.update(step)

    text = f"{STEPS} steps of {name} (plain: token by token)"
    versus(text, ours, plain.recurrent_training(config, STEPS))


def draw() -> None:
    """As a pack draws them."""
    task = preset("softmax-h2").task
    for step in range(STEPS):
        generator = generator_for(0, "train", step)
        draw_prompts(task, 256, generator=generator, numbers=normal_numbers)


def draw_plainly() -> None:
    for _ in range(STEPS):
        plain.sample()


def test_sampling(versus):
    versus(f"drawing the prompts of {STEPS} steps", draw, draw_plainly)


def test_sampling_bounds_the_step(versus):
    """How many times faster training would be if it cost nothing but its prompts."""
    loop = plain.training(2)
    versus(f"drawing prompts alone, against {STEPS} steps of 2 heads", draw, lambda: loop(STEPS))


def test_normal_numbers(versus):
    """Plain: torch; the numbers have the same bits."""
    size, generator = 64_256, torch.Generator()  # one step of the default task
    versus(
        "the normal numbers of 100 steps (plain: torch)",
        lambda: [normal_numbers(size, generator) for _ in range(STEPS)],
        lambda: [torch.empty(size).normal_(generator=generator) for _ in range(STEPS)],
    )
