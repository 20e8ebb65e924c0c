"""The real HookedTransformer of older versions takes our files, and we take its.

`make test-interop` builds an environment for each version and names them in INTEROP.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechinterp.checkpoints.checkpoint import Checkpoint, save
from mechinterp.checkpoints.load import convert
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.heads import predict
from mechinterp.training.one_layer.step import initial_weights
from tests.checkpoints.files import read as load

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("hooked_transformer.py")
ENVIRONMENTS = os.environ.get("INTEROP", "").split()
CLOSE = {"rtol": 0, "atol": 1e-5}
TWO_TASKS = ExperimentConfig(
    task=TaskConfig(d_x=3, d_y=2, context_length=10), model=ModelConfig(n_heads=3, d_head=4)
)

pytestmark = pytest.mark.skipif(not ENVIRONMENTS, reason="run by `make test-interop`")


@dataclass(frozen=True)
class Exchanged:
    """A checkpoint of ours, prompts, and what the other version made of both."""

    checkpoint: Checkpoint
    prompts: Prompts
    answers: dict[str, Tensor]
    state: Path
    """The state dict of the other version's model with other weights."""


@pytest.fixture(scope="module", params=["shipped", "two tasks, double precision"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    if request.param == "shipped":
        return load(ROOT / "checkpoints" / "softmax-h4-s0")
    weights = initial_weights(TWO_TASKS).to(torch.float64)
    weights = weights.with_tensors({"attn.W_O": 10 * weights.W_O})
    folder = tmp_path_factory.mktemp("two") / "tasks"
    save(folder, TWO_TASKS, weights, step=0)
    return load(folder)


@pytest.fixture(scope="module", params=ENVIRONMENTS or ["none"])
def exchanged(
    request: pytest.FixtureRequest,
    checkpoint: Checkpoint,
    tmp_path_factory: pytest.TempPathFactory,
) -> Exchanged:
    folder = tmp_path_factory.mktemp("interop")
    convert(checkpoint, "transformer-lens", folder / "exchange")
    generator, dtype = generator_for(3, "eval", 0), checkpoint.weights.dtype
    prompts = draw_prompts(checkpoint.config.task, 64, generator=generator, dtype=dtype)
    save_file({"tokens": prompts.tokens}, folder / "prompts.safetensors")
    python = ROOT / request.param / "bin" / "python"
    command = [str(python), str(SCRIPT), str(folder / "exchange"), str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    answers = load_file(folder / "y_hat.safetensors")
    return Exchanged(checkpoint, prompts, answers, folder / "state.pt")


def test_it_predicts_what_we_predict(exchanged: Exchanged):
    expected = predict(exchanged.checkpoint.weights, exchanged.prompts)
    assert expected.std() > 0.1
    torch.testing.assert_close(exchanged.answers["y_hat"], expected, **CLOSE)
    torch.testing.assert_close(exchanged.answers["after_reset"], expected, **CLOSE)


def test_its_mask_is_strict_also_for_long_prompts(exchanged: Exchanged):
    model, tokens = exchanged.checkpoint.model, exchanged.prompts.tokens
    pattern = exchanged.answers["pattern"]
    assert not pattern.diagonal(dim1=2, dim2=3).any()
    torch.testing.assert_close(pattern, model.run_with_cache(tokens)[1]["pattern", 0], **CLOSE)
    longer = model(torch.cat([tokens] * 3, dim=1))[:, -1]
    torch.testing.assert_close(exchanged.answers["longer"], longer, **CLOSE)


def test_we_predict_what_it_predicts(exchanged: Exchanged):
    found, task = load(exchanged.state), exchanged.checkpoint.config.task
    assert (found.format, found.config.task.d_x) == ("transformer-lens", task.d_x)
    expected = exchanged.answers["y_hat_other"]
    assert expected.std() > 0.1
    torch.testing.assert_close(predict(found.weights, exchanged.prompts), expected, **CLOSE)
    torch.testing.assert_close(found.model.predict(exchanged.prompts), expected, **CLOSE)
