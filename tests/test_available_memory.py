"""Computations whose memory is predictable go in chunks, or are refused with the bytes needed and the bytes available."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from mechinterp import memory
from mechinterp.analysis.one_layer import random_null as null
from mechinterp.checkpoints.checkpoint import save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.config.model import LAYOUTS
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.layers import tokens_of
from mechinterp.models.run.predictor import predictor_of
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.one_layer.step import initial_weights
from mechinterp.training.train import train_job
from tests.conftest import Run, assert_close_to_rounding, python

HEADS = ModelConfig(n_heads=3)
DEEP = ModelConfig(n_layers=2, n_heads=2, context_only=True, d_model=6, d_head=3)
LINEAR = ModelConfig(n_layers=2, context_only=True, d_head=3, score="linear/L")
NORMED = ModelConfig(n_layers=2, context_only=True, d_model=6, d_head=3, norm="before", d_mlp=5)
TASK = TaskConfig(d_x=3, context_length=5)
EACH_MODEL = pytest.mark.parametrize(
    "model", [HEADS, DEEP, LINEAR, NORMED], ids=lambda m: m.score + str(m.norm)
)
REFUSED = r"must fit into memory: (\d+) bytes are needed, (\d+) bytes are available\."


def experiment(model: ModelConfig, task: TaskConfig = TASK) -> ExperimentConfig:
    return ExperimentConfig(task=task, model=model)


def predictions(model: ModelConfig) -> list[Tensor]:
    """What a predictor says of 50 prompts, in every way."""
    config = experiment(model)
    initial = initial_weights if model.one_attention else initial_deep_weights
    predictor = predictor_of(initial(config))
    prompts = draw_prompts(TASK, 50)
    masked = predictor.run(prompts, [[], [(0, 1)]], method="resample")
    found = [predictor.predict(prompts), masked, predictor.run(prompts, [[(0, 0)]])]
    return found if model.one_attention else [*found, predictor.streams(prompts)]


@pytest.mark.slow
@EACH_MODEL
def test_chunks_say_what_all_prompts_at_once_say(monkeypatch, model: ModelConfig):
    whole = predictions(model)
    monkeypatch.setattr(memory, "CHUNK_BYTES", 1)
    for part, expected in zip(predictions(model), whole, strict=True):
        assert_close_to_rounding(part, expected)


def test_the_null_in_chunks_is_the_null(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(null, "MODELS", (6, 6))
    statistics = null.null_of.__wrapped__
    whole = statistics(TASK, HEADS, form="scalar")
    monkeypatch.setattr(null, "CHUNK_BYTES", 1)
    parts = statistics(TASK, HEADS, form="scalar")
    assert parts.n_models == whole.n_models == 6
    for name, values in whole.values.items():
        assert_close_to_rounding(parts.values[name].astype("float32"), values.astype("float32"))


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 1000 bytes left, where no more than 100 are taken without a look."""
    monkeypatch.setattr(memory, "CHUNK_BYTES", 100)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("9 prompts of 7 pairs with d_x = 3", lambda: draw_prompts(TASK, 9, context_length=7)),
        ("QK circuits of 3 heads of width 9",
         lambda: initial_weights(experiment(HEADS, TaskConfig(d_x=8))).QK),
        ("a step on 256 prompts of 5 pairs", lambda: DeepRun({"x": experiment(DEEP)})),
        ("a step on 256 prompts of 5 pairs", lambda: DeepRun({"x": experiment(NORMED)})),
        ("x.safetensors: training 1 models",
         lambda: train_job(Path("x.safetensors"), {"x": experiment(HEADS)})),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(words: str, asks: Callable[[], object]):
    with pytest.raises(ValueError, match=f"{re.escape(words)} {REFUSED}") as error:
        asks()
    needed, there = map(int, re.search(REFUSED, str(error.value)).groups())
    assert needed > there == 1000


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_foreseen_with_as_many_tokens_as_a_prompt_has(layout: str):
    config = experiment(replace(NORMED, layout=layout))
    n_tokens = tokens_of(draw_prompts(TASK, 1), config.model, d_x=3, d_y=1).shape[1]
    assert n_tokens == {"pairs": 6, "in_turn": 11}[layout]
    needed = config.train.batch_size * memory.layers_bytes(
        n_layers=config.model.n_layers,
        n_heads=config.model.n_heads,
        d_head=config.d_head,
        d_model=config.d_model,
        d_mlp=config.model.d_mlp or 0,
        n_tokens=n_tokens,
        width=4,
    )
    with pytest.raises(ValueError, match=f"a step on 256 prompts .*: {needed} bytes are needed"):
        DeepRun({"x": config})


@EACH_MODEL
def test_a_model_that_two_prompts_are_too_many_for(monkeypatch, model: ModelConfig):
    initial = initial_weights if model.one_attention else initial_deep_weights
    predictor, prompts = predictor_of(initial(experiment(model))), draw_prompts(TASK, 4)
    monkeypatch.setattr(memory, "CHUNK_BYTES", 100)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    for asks in (predictor.predict, lambda given: predictor.run(given, [[(0, 0)]])):
        with pytest.raises(ValueError, match=f"on prompts of 5 pairs, two prompts.*{REFUSED}"):
            asks(prompts)


def test_memory_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert 2**20 < memory.available_memory() < 2**50
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    stat = "anon 3\ninactive_file 20\n"
    for name, text in {"max": "5000\n", "current": "4000\n", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.available_memory() == 1020
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > 2**20


# Real sizes under a real limit: one process, which may take 1 GB.
LIMITED = """
import resource
import torch
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.training.general.trainer import initial_deep_weights
from mechinterp.training.one_layer.step import initial_weights

with open("/proc/self/statm") as used:
    limit = int(used.read().split()[0]) * resource.getpagesize() + 1_000_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
deep = dict(n_layers=2, context_only=True, d_model=6, d_head=2)

def tries(name, n_prompts, task, model):
    try:
        config = ExperimentConfig(task=TaskConfig(**task), model=ModelConfig(**model))
        initial = initial_deep_weights if config.model.n_layers > 1 else initial_weights
        predictor = predictor_of(initial(config))
        prompts = draw_prompts(config.task, n_prompts)
        print(name, len(predictor.run(prompts, [[(0, 0)]])[0]))
    except ValueError as error:
        print(name, error)

tries("heads", 4096, {}, {"n_heads": 500})
tries("deep-heads", 192, {}, {**deep, "n_heads": 500})
tries("pairs", 512, {"context_length": 10_000}, {})
tries("deep-pairs", 2, {"context_length": 10_000}, deep)
tries("most-pairs", 2, {"context_length": 2**20}, {})
tries("deep-most-pairs", 2, {"context_length": 2**20}, deep)
tries("wide-pairs", 4096, {"d_x": 1000, "context_length": 10_000}, {})
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory")
def test_real_sizes_within_real_limits():
    lines = python("-c", LIMITED).done().out.splitlines()
    found = dict(line.split(" ", 1) for line in lines)
    fit = {"heads": 4096, "deep-heads": 192, "pairs": 512, "most-pairs": 2}
    assert {name: int(found.pop(name)) for name in fit} == fit
    assert set(found) == {"deep-pairs", "deep-most-pairs", "wide-pairs"}
    for text in found.values():
        needed, there = map(int, re.search(REFUSED, text).groups())
        assert needed > there < 1_000_000_000


def test_a_command_names_the_file(run: Run, tmp_path: Path):
    config = experiment(ModelConfig(), TaskConfig(context_length=2**20))
    save(tmp_path / "long", config, initial_weights(config), step=0)
    ran = run("ablate", tmp_path / "long", "--n-prompts", 500_000)
    ran.assert_refused(tmp_path / "long", "1048576 pairs with d_x = 5", "got 500000")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x: can't allocate memory: y")])
def test_memory_that_was_not_foreseen(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("mechinterp.training.train.train_one", fails)
    named = "mechinterp.checkpoints.native.document.named_config"
    monkeypatch.setattr(named, lambda _: ExperimentConfig())
    run("train", "softmax-h2").assert_refused("train needs more memory than is available.")
