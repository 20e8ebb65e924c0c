"""--device of the commands that read checkpoints: what is refused, in one line."""

from pathlib import Path

import pytest
import torch

from mechinterp.cli.printing import about_paths
from tests.conftest import CHECKPOINTS, Run

ONE, DEEP = CHECKPOINTS / "softmax-h2-s0", CHECKPOINTS / "sparse-h4-noise0.1-s0"
COMMANDS: dict[str, tuple[object, ...]] = {
    "classify": (ONE, "--n-prompts", 64),
    "ablate": (ONE, "--n-prompts", 64),
    "prune": (DEEP, "--n-prompts", 128),
    "probe": (DEEP, "--n-prompts", 128),
    "analyse": ("ablate-heads", ONE, "--n-prompts", 64),
    "fit": (ONE, "--n-prompts", 64, "--context-length", 10),
    "report": (ONE, "--n-prompts", 64),
}


def arguments(command: str, tmp_path: Path, device: str) -> tuple[object, ...]:
    out = ("--out", tmp_path / device) if command == "report" else ()
    return (command, *COMMANDS[command], *out, "--json", "--device", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [*COMMANDS, "train"])
def test_a_gpu_that_is_not_there_is_refused(command: str, run: Run, tmp_path: Path):
    train = ("train", "softmax-h1", "--device", "cuda", "--out", tmp_path / "cuda")
    found = run(*(train if command == "train" else arguments(command, tmp_path, "cuda")))
    found.assert_refused("--device cuda needs a GPU that PyTorch can use; there is none.")
    assert not (tmp_path / "cuda").exists()


def test_a_gpu_that_is_full_is_told_as_memory_that_is_full():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with (
        pytest.raises(ValueError, match=r"^model: needs more memory than is available\.$"),
        about_paths(Path("model")),
    ):
        raise error
