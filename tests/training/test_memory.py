"""Memory: large batches are used in chunks, a limit is kept, and finished models leave nothing behind."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.memory import prompt_bytes
from mechinterp.models.heads import predict
from mechinterp.training import run as running
from mechinterp.training import train as training
from mechinterp.training.one_layer.step import Pack, loss_and_gradients, membership, pack_bytes
from mechinterp.training.run import batch_chunks
from tests.conftest import python

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=8),
    model=ModelConfig(n_heads=2),
    train=TrainConfig(steps=4, batch_size=70, log_every=2, n_eval_prompts=50),
)


def test_a_large_batch_is_drawn_in_chunks_that_the_task_decides(monkeypatch: pytest.MonkeyPatch):
    task = CONFIG.task
    assert prompt_bytes(task) == 4 * (9 * 4 + 3)
    monkeypatch.setattr(running, "CHUNK_BYTES", 32 * prompt_bytes(task) + 5)
    chunks = list(batch_chunks(task, 70, generator=generator_for(0, "train", 0)))
    assert [len(chunk) for chunk in chunks] == [32, 32, 6]
    generator = generator_for(0, "train", 0)
    for chunk in chunks:
        expected = sample_prompts(task, len(chunk), generator=generator)
        assert all(torch.equal(part, vars(chunk)[name]) for name, part in vars(expected).items())
    monkeypatch.setattr(running, "CHUNK_BYTES", 1)
    assert len(list(batch_chunks(task, 3, generator=generator))) == 3


def test_a_step_in_chunks_is_the_step_on_the_whole_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "CHUNK_BYTES", 32 * prompt_bytes(CONFIG.task))
    pack = Pack({"model": CONFIG})
    start = pack.results()["model"].weights
    pack._set_gradient(0)
    chunks = list(batch_chunks(CONFIG.task, 70, generator=generator_for(0, "train", 0)))
    parts = {name: [getattr(chunk, name) for chunk in chunks] for name in vars(chunks[0])}
    whole = Prompts(**{name: torch.cat(rows) for name, rows in parts.items()})
    loss, gradients = loss_and_gradients(start, whole, membership([2]))
    expected = torch.cat([tensor.flatten() for tensor in gradients.tensors.values()])
    torch.testing.assert_close(pack.gradient, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(pack.loss_sum, loss, rtol=1e-6, atol=0)

    parts = list(batch_chunks(CONFIG.task, 50, generator=generator_for(0, "eval", 0)))
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
    many = override(CONFIG, "train.batch_size=500000", "task.context_length=40", "train.steps=2")
    batch = 500_000 * prompt_bytes(many.task)
    assert batch > 300e6
    rise = int(python("-c", PEAK, asdict(many), tmp_path / "run").done().out)
    assert rise < training.FIRST_USE_BYTES + pack_bytes({"many": many})
    assert pack_bytes({"many": many}) < 0.25 * batch
