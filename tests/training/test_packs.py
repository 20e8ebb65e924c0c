"""Packs: what trains together is decided by the configs and a constant, pools of tasks among it; jobs can be run again.

Large batches are used in chunks, and a limit of memory is kept.
"""

from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.memory import prompt_bytes
from mechinterp.models.heads import predict
from mechinterp.presets import preset
from mechinterp.training import batches
from mechinterp.training.batches import batch_chunks
from mechinterp.training.one_layer.step import (
    Pack,
    loss_and_gradients,
    membership,
    pack_bytes,
    packs,
)
from mechinterp.training.run_folder import pack_jobs
from mechinterp.training.train import FIRST_USE_BYTES, train_models
from tests.conftest import assert_same, python
from tests.training.test_sweep import SMALL
from tests.training.test_trainer import finished

MODELS = {f"s{seed}": override(SMALL, f"seed={seed}") for seed in range(3)}


def names_of(packed: list[dict[str, ExperimentConfig]]) -> list[list[str]]:
    return [list(pack) for pack in packed]


def test_models_that_differ_in_seed_and_heads_share_a_pack():
    models = {
        "a": SMALL,
        "other task": override(SMALL, "task.noise_var=0.3"),
        "b": override(SMALL, "seed=1", "model.n_heads=5"),
        "other task again": override(SMALL, "task.noise_var=0.3", "seed=9"),
        "other prompts": override(SMALL, "train.data_seed=1"),
        "flow": override(preset("linear-separate"), "train.steps=10"),
        "flow again": override(preset("linear-separate"), "train.steps=10", "seed=1"),
    }
    assert names_of(packs(models)) == [
        *(["a", "b"], ["other task", "other task again"], ["other prompts"]),
        *(["flow"], ["flow again"]),  # no prompts to share
    ]


def test_a_run_in_several_packs_has_the_bits_of_one_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = finished(Pack(MODELS))
    monkeypatch.setattr("mechinterp.training.one_layer.step.PACK_HEADS", 4)
    assert names_of(packs(MODELS)) == [["s0", "s1"], ["s2"]]
    assert train_models(MODELS, tmp_path).steps == 40
    for name, trained in whole.results().items():
        assert_same(load(tmp_path / name).weights, trained.weights)


def test_jobs_are_the_stopped_packs_and_what_is_not_begun(tmp_path: Path):
    pack = Pack({"s1": MODELS["s1"]})
    pack.save(tmp_path / "training-4.safetensors")
    train_models({"s0": MODELS["s0"]}, tmp_path / "done")
    (tmp_path / "done" / "s0").rename(tmp_path / "s0")
    models = MODELS | {"longer": override(SMALL, "train.steps=30")}
    assert pack_jobs(models, tmp_path) == {
        tmp_path / "training-4.safetensors": {"s1": MODELS["s1"]},
        tmp_path / "training-5.safetensors": {"s2": MODELS["s2"]},
        tmp_path / "training-6.safetensors": {"longer": models["longer"]},
    }


TASK = TaskConfig(d_x=2, context_length=4, beta_var=1.0, noise_var=0.1)
TRAIN = TrainConfig(steps=40, batch_size=32, n_eval_prompts=64, log_every=20, learning_rate=0.02)


@pytest.mark.slow
def test_models_of_several_pools_share_a_pack_and_have_the_bits_of_their_own(tmp_path: Path):
    mixed = {
        f"m{n}-s{seed}": ExperimentConfig(replace(TASK, n_tasks=n), model, TRAIN, seed)
        for seed, model in enumerate((ModelConfig(n_heads=1), ModelConfig(n_heads=3)))
        for n in (1, 3, None)
    }
    other = replace(TASK, n_tasks=3, task_seed=1)
    mixed["other pool"] = replace(mixed["m3-s0"], task=other)
    assert packs(mixed) == [mixed]
    together, file = Pack(mixed), tmp_path / "state.safetensors"
    together.advance()
    together.save(file)
    together = Pack.restore(file)
    together.advance()
    results = together.results()
    assert together.finished
    assert results.keys() == mixed.keys()
    for name, config in mixed.items():
        expected = finished(Pack({name: config})).results()[name]
        assert results[name].config == config
        assert_same(results[name].weights, expected.weights)
        pd.testing.assert_frame_equal(results[name].history, expected.history, check_exact=True)
    first, second = (results[name].history["eval_loss"] for name in ("m3-s0", "other pool"))
    assert (first != second).all()


# Large batches are used in chunks.

LARGE = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=8),
    model=ModelConfig(n_heads=2),
    train=TrainConfig(steps=4, batch_size=70, log_every=2, n_eval_prompts=50),
)


def test_a_large_batch_is_drawn_in_chunks_that_the_task_decides(monkeypatch: pytest.MonkeyPatch):
    task = LARGE.task
    assert prompt_bytes(task) == 4 * (9 * 4 + 3)
    monkeypatch.setattr(batches, "BATCH_CHUNK_BYTES", 32 * prompt_bytes(task) + 5)
    chunks = list(batch_chunks(task, 70, generator=generator_for(0, "train", 0)))
    assert [len(chunk) for chunk in chunks] == [32, 32, 6]
    generator = generator_for(0, "train", 0)
    for chunk in chunks:
        expected = draw_prompts(task, len(chunk), generator=generator)
        assert chunk.drifting is None
        assert torch.equal(chunk.tokens, expected.tokens)
        assert torch.equal(chunk.y_query, expected.y_query)
        assert torch.equal(chunk.beta, expected.beta)
    monkeypatch.setattr(batches, "BATCH_CHUNK_BYTES", 1)
    assert len(list(batch_chunks(task, 3, generator=generator))) == 3


def test_a_step_in_chunks_is_the_step_on_the_whole_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batches, "BATCH_CHUNK_BYTES", 32 * prompt_bytes(LARGE.task))
    pack = Pack({"model": LARGE})
    start = pack.results()["model"].weights
    pack._set_gradient(0)
    chunks = list(batch_chunks(LARGE.task, 70, generator=generator_for(0, "train", 0)))
    known = [name for name, rows in vars(chunks[0]).items() if rows is not None]
    whole = Prompts(**{n: torch.cat([getattr(chunk, n) for chunk in chunks]) for n in known})
    loss, gradients = loss_and_gradients(start, whole, membership([2]))
    expected = torch.cat([tensor.flatten() for tensor in gradients.tensors.values()])
    torch.testing.assert_close(pack.gradient, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(pack.loss_sum, loss, rtol=1e-6, atol=0)

    parts = list(batch_chunks(LARGE.task, 50, generator=generator_for(0, "eval", 0)))
    squares = [(predict(start, part) - part.y_query).square() for part in parts]
    assert pack.rows["eval_loss"][0, 0] == pytest.approx(torch.cat(squares).mean().item(), rel=1e-6)


PEAK = """
import sys, torch
from mechinterp.config import from_dict
from mechinterp.memory import peak_memory
from mechinterp.training.one_layer import kernel, step
from mechinterp.training.train import train_models
torch.set_num_threads(1)
before = peak_memory()
train_models({"many": from_dict(eval(sys.argv[1]))}, sys.argv[2])
print(peak_memory() - before)
"""


@pytest.mark.exhaustive
def test_a_batch_of_half_a_million_prompts_needs_little_memory(tmp_path: Path):
    many = override(LARGE, "train.batch_size=500000", "task.context_length=40", "train.steps=2")
    batch = 500_000 * prompt_bytes(many.task)
    assert batch > 300e6
    rise = int(python("-c", PEAK, asdict(many), tmp_path / "run").done().out)
    assert rise < FIRST_USE_BYTES + pack_bytes({"many": many})
    assert pack_bytes({"many": many}) < 0.25 * batch
