"""Packs: they resume to the same bits, log what they say they log, and train as plain PyTorch does."""

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.heads import predict
from mechinterp.models.weights import Weights
from mechinterp.training import run
from mechinterp.training.one_layer.step import Pack, initial_weights
from mechinterp.training.run import Progress, train_run
from mechinterp.training.state import read_state
from tests.benchmarks import plain
from tests.conftest import assert_same, refused

SMALL = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=8),
    model=ModelConfig(n_heads=2),
    # 50 is no multiple of 16 and 25 none of 10: the last chunk and the last row are short ones.
    train=TrainConfig(
        steps=25, batch_size=16, log_every=10, snapshot_every=4, n_eval_prompts=50, data_seed=7
    ),
    seed=5,
)
MODELS = {
    "two": SMALL,
    "one": override(SMALL, "model.n_heads=1"),
    "three": override(SMALL, "model.n_heads=3", "seed=6"),
}


def finished(pack: Pack) -> Pack:
    while not pack.finished:
        pack.advance()
    return pack


def train_prompts(config: ExperimentConfig, step: int) -> Prompts:
    generator = generator_for(config.train.data_seed, "train", step)
    return draw_prompts(config.task, config.train.batch_size, generator=generator)


def squared_error(weights: Weights, prompts: Prompts) -> float:
    return (predict(weights, prompts) - prompts.y_query).square().mean().item()


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    straight, file = finished(Pack(MODELS)), tmp_path / "state.safetensors"
    resumed = Pack(MODELS)
    while not resumed.finished:
        resumed.save(file)
        resumed = Pack.restore(file)
        resumed.advance()
    assert resumed.models == straight.models
    assert resumed.step == straight.step == 25
    assert torch.equal(resumed.flat, straight.flat)
    for name, moment in straight.moments.items():
        assert moment.abs().max() > 0
        assert torch.equal(resumed.moments[name], moment)
    assert resumed.rows.keys() == straight.rows.keys()
    for name, rows in straight.rows.items():
        torch.testing.assert_close(resumed.rows[name], rows, rtol=0, atol=0, equal_nan=True)
    assert resumed.snapshots.keys() == straight.snapshots.keys()
    for step, flat in straight.snapshots.items():
        assert torch.equal(resumed.snapshots[step], flat)


def test_history_describes_the_weights_of_its_model_and_step():
    for name, trained in finished(Pack(MODELS)).results().items():
        config, n_heads = MODELS[name], MODELS[name].model.n_heads
        # Step 20 is a logged step and a snapshot, 25 is the end.
        for step, named in {20: trained.snapshots[20], 25: trained.weights}.items():
            weights = named
            rows = trained.history[trained.history["step"] == step]
            assert len(rows) == n_heads
            generator = generator_for(config.train.data_seed, "eval", 0)
            prompts = draw_prompts(config.task, 50, generator=generator)
            expected = {
                "eval_loss": torch.full((n_heads,), squared_error(weights, prompts)),
                "omega": weights.omega.mean(1),
                "mu": weights.mu.mean(1),
                "qk_diagonal": weights.qk_diagonal,
                "ov_last_entry": weights.ov_last_entry,
            }
            for column, values in expected.items():
                np.testing.assert_allclose(rows[column], values, rtol=1e-5, err_msg=column)


@pytest.mark.slow
def test_loss_is_the_mean_of_the_training_losses_since_the_last_row():
    every_step = finished(Pack({"two": override(SMALL, "train.log_every=1")}))
    losses = every_step.rows["loss"][1:, 0]
    first = squared_error(initial_weights(SMALL), train_prompts(SMALL, 0))
    assert losses[0] == pytest.approx(first)
    # The loss of step 9 was met before the update that makes it step 9's.
    at_8 = every_step.results()["two"].snapshots[8]
    assert losses[8] == pytest.approx(squared_error(at_8, train_prompts(SMALL, 8)))

    pack = Pack({"two": SMALL})
    returned = [pack.advance() for _ in range(3)]
    expected = [part.mean().item() for part in losses.split(10)]
    assert returned == pytest.approx(expected)
    assert pack.rows["loss"][1:, 0].tolist() == pytest.approx(expected)


def test_snapshots_hold_the_weights_after_that_many_updates():
    trained = finished(Pack({"two": SMALL})).results()["two"]
    assert list(trained.snapshots) == [0, 4, 8, 12, 16, 20, 24]
    assert_same(trained.snapshots[0], initial_weights(SMALL))
    for step in (4, 20):
        stopped = finished(Pack({"two": override(SMALL, f"train.steps={step}")})).results()["two"]
        assert stopped.step == step
        assert_same(trained.snapshots[step], stopped.weights)


@pytest.mark.slow
@pytest.mark.parametrize("d_y", [1, 2])
def test_training_equals_plain_pytorch(d_y: int):
    config = override(SMALL, "model.n_heads=3", "train.steps=50", f"task.d_y={d_y}")
    start = initial_weights(config)
    model = plain.attention(start).requires_grad_()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(50):
        prompts = train_prompts(config, step)
        predictions = model(prompts.tokens[:, -1:], prompts.context_tokens)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(predictions, prompts.y_query).backward()
        optimizer.step()

    weights = finished(Pack({"model": config})).results()["model"].weights
    assert (weights.W_Q - start.W_Q).norm() > 0.01 * start.W_Q.norm()
    trained = plain.attention(weights).state_dict()
    for name, expected in model.state_dict().items():
        assert (trained[name] - expected).norm() < 1e-5 * expected.norm(), name


def test_train_run_reports_and_can_be_resumed_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run, "SAVE_SECONDS", 0.0)
    file, seen = tmp_path / "state.safetensors", []

    def interrupt(progress: Progress):
        seen.append(progress)
        if progress.step == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(Pack(MODELS), file, on_log=interrupt)
    assert [(p.step, p.steps, p.n_models) for p in seen] == [(10, 25, 3), (20, 25, 3)]
    assert seen[0].steps_per_second > 0
    assert seen[0].seconds_left == pytest.approx(15 / seen[0].steps_per_second)

    resumed = Pack.restore(file)
    assert resumed.step == 20
    assert seen[1].loss == pytest.approx(resumed.rows["loss"][-1].mean().item())
    assert train_run(resumed, file) > 0
    assert torch.equal(Pack.restore(file).flat, finished(Pack(MODELS)).flat)


def cut_short(file: Path):
    Pack(MODELS).save(file)
    file.write_bytes(file.read_bytes()[:-100])


BAD_FILES = {
    "nothing": lambda file: None,
    "cut short": cut_short,
    "other tensors": lambda file: save_file({"flat": torch.zeros(3)}, file),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_state_file_is_refused_on_one_line(tmp_path: Path, kind: str):
    file = tmp_path / "state.safetensors"
    BAD_FILES[kind](file)
    words = ["does not exist"] if kind == "nothing" else []
    with refused(file, "training state", *words, error=CheckpointError):
        Pack.restore(file)


@pytest.mark.slow
def test_a_flipped_bit_in_a_state_is_refused(tmp_path: Path):
    """Every bit that says something; those that do not, such as blanks, may change nothing."""
    file, pack = tmp_path / "training-0.safetensors", Pack(MODELS)
    pack.advance()
    pack.save(file)
    whole, generator = file.read_bytes(), torch.Generator().manual_seed(0)
    start = 8 + int.from_bytes(whole[:8], "little")

    def flip(place: int) -> None:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])

    for place in torch.randint(start, len(whole), (40,), generator=generator).tolist():
        flip(place)
        with refused("checksum", error=CheckpointError):
            Pack.restore(file)
    for place in torch.randint(0, start, (100,), generator=generator).tolist():
        flip(place)
        with suppress(CheckpointError):
            again = Pack.restore(file)
            assert again.models == pack.models
            assert again.step == pack.step
            assert torch.equal(again.flat, pack.flat)


def of_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Pack], None]:
    return lambda pack: pack.rows.update(mu=change(pack.rows["mu"]))


def of_snapshots(step: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    return lambda pack: pack.snapshots.update({step: change(pack.flat).clone()})


def one_weight_for_all(pack: Pack):
    pack.flat, pack.snapshots = torch.zeros(()), {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pack: setattr(pack, "step", 999), ("step", "0 to 25", 999)),
        (lambda pack: setattr(pack, "step", 11), ("rows", "up to 11")),
        (of_rows(lambda mu: mu[1:]), ("mu", "got 1")),
        (of_rows(lambda mu: mu[:, :1]), ("mu", "shape")),
        (lambda pack: pack.rows.pop("mu"), ("rows", "step, loss, ")),
        (one_weight_for_all, ("weights", "shape")),
        (lambda pack: pack.moments.update(exp_avg=torch.zeros(1)), ("exp_avg", "shape")),
        (of_snapshots(20, lambda flat: flat), ("snapshot", 20)),
        (of_snapshots(0, lambda flat: flat[:3]), ("snapshot 0", "shape")),
    ],
)
def test_a_state_that_says_what_cannot_be_is_refused(tmp_path: Path, change, words: tuple):
    file, pack = tmp_path / "training-0.safetensors", Pack(MODELS)
    pack.advance()
    change(pack)
    pack.save(file)
    with refused(file, *words, error=CheckpointError):
        Pack.restore(file)


def leave_out(file: Path, name: str) -> None:
    """Write a state anew without one field of its metadata."""
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    del metadata[name]
    save_file(tensors, file, metadata=metadata)


@pytest.mark.parametrize("field", ["checksum", "order"])
def test_a_state_without_a_checksum_or_order_is_refused(tmp_path: Path, field: str):
    file = tmp_path / "training-0.safetensors"
    Pack(MODELS).save(file)
    Pack.restore(file)
    leave_out(file, field)
    with refused("training state", field, error=CheckpointError):
        Pack.restore(file)


class Interrupted(Pack):
    """A pack that gets Ctrl-C in the middle of steps."""

    interrupts: tuple[int, ...] = ()

    def update(self, step: int) -> None:
        if step in self.interrupts:
            signal.raise_signal(signal.SIGINT)
        super().update(step)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C; a shell's background job ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_first_interrupt_saves_the_next_logged_step_and_a_second_ends_at_once(tmp_path: Path):
    file, every = tmp_path / "training.safetensors", next(iter(MODELS.values())).train.log_every
    once = Interrupted(MODELS)
    once.interrupts = (every + 1,)
    with pytest.raises(KeyboardInterrupt):
        train_run(once, file)
    assert once.step == read_state(file)[1] == 2 * every
    whole, again = Pack(MODELS), Pack.restore(file)
    for each in (whole, again):
        while not each.finished:
            each.advance()
    assert torch.equal(again.flat, whole.flat)
    file.unlink()
    twice = Interrupted(MODELS)
    twice.interrupts = (0, 1)
    with pytest.raises(KeyboardInterrupt):
        train_run(twice, file)
    assert not file.exists()
