"""How many files of the package a call enters, and how often it moves between them.

    python -m tests.count_files

The second call in a process counts, so that imports are left out."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mechinterp import classify, load, override, preset, train
from tests.checkpoints.files import saved
from tests.models.test_layered_models import garg

PACKAGE = str(Path(__file__).parents[1] / "mechinterp")
ROWS = "{:<34}{:>6}{:>10}"


def entered(call: Callable[[], object]) -> tuple[int, int]:
    """Files of the package that a call enters, and moves between two of them."""
    call()
    visited: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and (not visited or visited[-1] != file):
            visited.append(file)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(set(visited)), len(visited) - 1


def main() -> None:
    one, stack = load("checkpoints/softmax-h2-s0"), load("checkpoints/pool-linear-m16-s0")
    short = override(preset("softmax-h2"), "train.steps=20", "train.n_eval_prompts=64")
    with tempfile.TemporaryDirectory() as folder:
        runs, gpt2 = iter(range(2)), saved(Path(folder), garg().state_dict())
        calls: dict[str, Callable[[], object]] = {
            "classify, one layer": lambda: classify(one),
            "classify, a stack": lambda: classify(stack),
            "load, a GPT-2 file": lambda: load(gpt2, n_heads=4),
            "load, garg-gpt2": lambda: load("checkpoints/garg-gpt2"),
            "train, 20 steps of softmax-h2": lambda: train(short, out=f"{folder}/{next(runs)}"),
        }
        print(ROWS.format("call", "files", "moves"))
        for name, call in calls.items():
            print(ROWS.format(name, *entered(call)))


if __name__ == "__main__":
    main()
