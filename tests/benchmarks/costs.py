"""Processor time of every analysis at its defaults: `OMP_NUM_THREADS=1 python -m tests.benchmarks.costs` writes costs.md.

Three shipped models and one hooked module, on one thread; three analyses run once before, which compiles and imports.
"""

import signal
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from mechinterp import TaskConfig, hook_module, load, write_report
from mechinterp.analysis.registry import ANALYSES, run_analysis

MODELS = ("softmax-h2-s0", "sparse-h4-noise0.1-s0", "garg-gpt2", "hooked encoder")
LONG = 30
"""Seconds of the processor after which an analysis is stopped."""
PAGE = "the page of `report`"
WHY = (
    "The longest: `local-learning-coefficient` of a deep model takes a gradient on all prompts for every step; one that would",
    "take more than ten minutes is refused unless its chains are stated.",
)
FILE = Path(__file__).with_name("costs.md")


class Encoder(nn.Module):
    """One encoder layer of width 64 with a read-in and a read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in, self.read_out = nn.Linear(6, 64), nn.Linear(64, 1)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.read_out(self.layer(self.read_in(tokens)))[:, -1]


def model(name: str) -> object:
    torch.manual_seed(0)
    return hook_module(Encoder(), task=TaskConfig()) if name == "hooked encoder" else load(name)


def seconds(analysis: str, name: str) -> str:
    """Processor seconds without loading; empty where the model is not accepted."""
    source: Any = model(name)
    signal.setitimer(signal.ITIMER_PROF, LONG)
    try:
        start = time.process_time()
        if analysis == PAGE:
            with TemporaryDirectory() as folder:
                write_report(source, folder)
        else:
            run_analysis(analysis, source)
        return f"{time.process_time() - start:.1f}"
    except TimeoutError:
        return f"> {LONG}"
    except ValueError:
        return ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def stop(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, stop)
    for name in MODELS:
        for analysis in ("classify", "ablate", "compare-learners"):
            seconds(analysis, name)
    rows = [
        f"| {each} | {' | '.join(seconds(each, n) for n in MODELS)} |" for each in (*ANALYSES, PAGE)
    ]
    lines = [
        *("# Processor time of the analyses", ""),
        "`OMP_NUM_THREADS=1 python -m tests.benchmarks.costs` writes this page: seconds of the processor on one thread, at",
        "the defaults, without loading. `git diff` of this page compares two commits. An empty cell means that the analysis",
        "does not take the model. The hooked encoder is one layer of width 64.",
        *("", f"| analysis | {' | '.join(MODELS)} |", "|---|" + "---:|" * len(MODELS), *rows),
        *("", *WHY, "", f"PyTorch {torch.__version__}."),
    ]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
