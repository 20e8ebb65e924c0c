"""Masking at the steps of a training: each step's numbers are those of its own weights."""

from dataclasses import replace

import numpy as np
import pytest

from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.analysis.training.deep_snapshots import deep_snapshots
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.hooked.transformer import ICLTransformer
from tests.conftest import CHECKPOINTS


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load(CHECKPOINTS / "sparse-h4-noise0.1-s0")


@pytest.fixture(scope="module")
def some(checkpoint: Checkpoint) -> Prompts:
    return sample_prompts(checkpoint.config.task, 64, generator=generator_for(0, "eval", 0))


@pytest.mark.slow
def test_each_step_is_masked_on_its_own(checkpoint, some):
    found = deep_snapshots(checkpoint, some)
    assert found.step.tolist() == [0, 1000, 2000, 5000, 10_000, 20_000, 50_000]
    for row in (0, 2):
        weights = checkpoint.snapshots[int(found.step[row])]
        model = ICLTransformer.from_weights(weights, task=checkpoint.config.task)
        own = ablate_heads(model, some)
        np.testing.assert_array_equal(found.rise[row], own.rise)
        np.testing.assert_array_equal(found.importance[row], own.importance)
        assert (found.risk[row], found.risk_sem[row]) == (own.full_risk, own.full_risk_sem)
        assert found.effective_heads[row].tolist() == own.effective_heads.tolist()
    history = checkpoint.history
    assert found.eval_loss[-1] == history["eval_loss"].iloc[-1]
    frame = found.to_frame()
    assert len(frame) == 7 * 4
    assert frame.top_rise[9] == found.rise[2, 1].max()
    shown = [np.array(each.data[0].z) for each in found.plot().frames]
    np.testing.assert_allclose(shown, found.importance, rtol=1e-6)
    assert [each.name for each in found.plot_loss().frames][:2] == ["0", "1,000"]
    assert repr(found).startswith("DeepSnapshots(7, risk ")


def test_a_checkpoint_without_snapshots_is_refused(checkpoint, some, tmp_path):
    rule = f"deep_snapshots needs a checkpoint with snapshots, got {tmp_path} without"
    with pytest.raises(ValueError, match=rule):
        deep_snapshots(replace(checkpoint, path=tmp_path), some)
