"""Benchmarks against a plain counterpart in the same run, and the table of their ratios."""

import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROWS = pytest.StashKey[list[tuple[str, float, float, float, float | None]]]()
HEADER = """# Speed against plain counterparts

`make bench` writes this page, in seven minutes to half an hour, by machine. Every row is one run on one thread: rounds of
the plain code (`plain.py`) and of ours alternate, so that both meet the same machine; times are those of the
processor, and the least of each counts. The ratio is that of these times for the same work: for a pack of several
models, model-steps. The share of the machine is what of the time the step's matrix products would take (those of the
plain loop, forward and backward) if nothing else were done and all went as fast as products of the tokens of a batch
with a matrix of the width of the stream, which are timed in the same rounds.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, help="Markdown file for the ratios.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def versus(benchmark, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Times ours and the plain code in turn."""

    def compare(
        name: str,
        ours: Callable[[], object],
        plain: Callable[[], object],
        *,
        work: float = 1,
        rounds: int = 7,
        prepare: Callable[[], object] = lambda: None,
        machine: Callable[[], object] | None = None,
    ) -> None:
        """Compare the two.

        Args:
            work: How many times the plain work ours does.
            prepare: Runs before each of ours, untimed.
            machine: The matrix products of our work and nothing else.
        """
        times, bare = [], []

        def time_plain() -> None:
            times.append(_seconds(plain))
            if machine is not None:
                bare.append(_seconds(machine))
            prepare()

        time_plain()
        ours()
        times.clear()
        bare.clear()
        benchmark.pedantic(ours, setup=time_plain, rounds=rounds)
        own = benchmark.stats.stats.min
        share = min(bare) / own if bare else None
        ratio = work * min(times) / own
        benchmark.extra_info |= {"plain_seconds": min(times), "ratio": ratio, "share": share}
        request.config.stash[ROWS].append((name, min(times), own, ratio, share))

    return compare


def _seconds(function: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    table = [
        "| what | plain (ms) | ours (ms) | share of the machine | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, plain, own, ratio, share in config.stash[ROWS]:
        part = "" if share is None else f"{share:.0%}"
        table.append(f"| {name} | {1000 * plain:.4g} | {1000 * own:.4g} | {part} | {ratio:.1f} |")
    machine = f"{_processor()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    terminalreporter.write_line("\n".join([*table, machine]))
    if config.option.table is not None:
        page = [HEADER, *table, "", f"Measured on: {machine}.\n"]
        config.option.table.write_text("\n".join(page))


def _processor() -> str:
    from cpuinfo import get_cpu_info

    return get_cpu_info().get("brand_raw", platform.machine())
