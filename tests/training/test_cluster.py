"""Packs as Ray tasks: the bits of a local run, on a cluster that loses a node."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.io.locks import LOCK_MARK, locked
from mechinterp.config import ExperimentConfig, TaskConfig, TrainConfig, override
from mechinterp.presets import preset
from mechinterp.training.ray import train_anywhere, train_on_ray
from mechinterp.training.train import train_models
from tests.conftest import refused
from tests.training.test_sweep import assert_same_folders

BASE = ExperimentConfig(
    task=TaskConfig(d_x=2, context_length=8),
    train=TrainConfig(steps=5000, batch_size=64, log_every=100, n_eval_prompts=64),
)
# Three packs of two models, one of a model that diverges, and a flow.
MODELS = {
    f"n{noise}-s{seed}": override(BASE, f"task.noise_var={noise}", f"seed={seed}")
    for noise in (0.1, 0.2, 0.3)
    for seed in (0, 1)
}
MODELS["wild"] = override(BASE, "train.learning_rate=1e30")
MODELS["flow"] = override(preset("linear-separate"), "train.steps=400")
FLOW = {"flow": MODELS["flow"]}


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    """A node of one CPU on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 1, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.mark.exhaustive
def test_a_worker_s_error_reaches_the_caller_on_one_line(tmp_path: Path, cluster):
    def engine(jobs, on_log):
        (tmp_path / "flow").write_text("in the way")  # it came after the run had begun
        return train_on_ray(jobs, on_log, address=cluster.address)

    with refused(tmp_path / "flow", "written", error=CheckpointError):
        train_models({"flow": MODELS["flow"]}, tmp_path, resume=True, engine=engine)


@pytest.mark.exhaustive
def test_a_sweep_loses_nothing_when_a_node_is_killed(tmp_path: Path, cluster):
    local, spread = tmp_path / "local", tmp_path / "spread"
    lost = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()

    def kill_a_node() -> list[str]:
        """One that trains: every node has one CPU, and two packs have been begun."""
        while len(states := sorted(file.name for file in spread.glob("training-*"))) < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        cluster.remove_node(lost, allow_graceful=False)
        return states

    seen = []
    engine = partial(train_on_ray, address=cluster.address, device="cpu")
    with ThreadPoolExecutor() as pool:
        killer = pool.submit(kill_a_node)
        summary = train_models(MODELS, spread, engine=engine, on_log=seen.append)
    assert len(killer.result()) == 2  # begun at that moment; another may have been finished by then
    assert summary.diverged == {"wild": 100}
    assert [(p.steps, p.n_models) for p in seen][-1][0] == seen[-1].step == 4 * 5000 + 400
    assert [p.diverged for p in seen if p.diverged] == [("wild",)]
    assert len(seen) == 5
    expected = train_models(MODELS, local)
    assert summary.diverged == expected.diverged
    assert summary.loss == expected.loss
    assert [folder.name for folder in summary.checkpoints] == [n for n in MODELS if n != "wild"]
    assert_same_folders(spread, local)


def test_a_machine_that_does_not_see_the_run_folder_says_so(tmp_path: Path):
    file = tmp_path / "elsewhere" / "training-0.safetensors"
    with refused("elsewhere", "every machine", error=CheckpointError):
        train_anywhere(file, FLOW, "cpu")
    assert not (tmp_path / "elsewhere").exists()


def test_a_pack_waits_for_a_machine_that_still_writes_it(tmp_path: Path):
    file = tmp_path / "training-0.safetensors"
    with ThreadPoolExecutor() as pool:
        with locked(tmp_path / ".training-0.lock"):
            waiting = pool.submit(train_anywhere, file, FLOW, "cpu")
            time.sleep(0.5)
            assert not waiting.done()
            assert not (tmp_path / "flow").exists()
        assert waiting.result(timeout=60).steps == 400
    assert [path.name for path in tmp_path.iterdir()] == ["flow"]


@pytest.mark.exhaustive
def test_ray_that_is_started_here_is_reached_from_here_alone(tmp_path: Path):
    ray = pytest.importorskip("ray")
    started = []

    def noting(jobs, on_log):
        for outcome in train_on_ray(jobs):
            started.extend(node["NodeManagerAddress"] for node in ray.nodes())
            yield outcome

    train_models({"short": override(BASE, "train.steps=20")}, tmp_path, engine=noting)
    assert started == ["127.0.0.2"] if sys.platform == "linux" else started
    # Nothing but the model is left, no lock among it.
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_locks_that_killed_workers_left_are_deleted(tmp_path: Path):
    for name in (".training-0.lock", ".training-7.lock"):
        (tmp_path / name).write_text(LOCK_MARK)
    (tmp_path / ".training-8.lock").write_text("mine")
    models = {"flow": MODELS["flow"]}
    assert train_models(models, tmp_path).steps == 400
    assert sorted(path.name for path in tmp_path.iterdir()) == [".training-8.lock", "flow"]


def test_a_worker_that_outlives_its_run_is_not_written_over(tmp_path: Path):
    models = {"flow": MODELS["flow"]}
    busy = refused(tmp_path, "another process is training here", error=CheckpointError)
    with locked(tmp_path / ".training-0.lock"), busy:
        train_models(models, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert train_models(models, tmp_path).steps == 400
