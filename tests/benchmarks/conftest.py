"""Benchmarks against a plain counterpart in the same run, and the table of their ratios."""

import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROWS = pytest.StashKey[list[tuple[str, float, float, float]]]()
HEADER = """# Speed against plain counterparts

`make bench` writes this page, in seven minutes where nothing else runs. Every row is one run on one thread: rounds of
the plain code (`plain.py`) and of ours alternate, so that both meet the same machine; times are those of the
processor, and the least of each counts. The ratio is that of these times for the same work: for a pack of several
models, model-steps.
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
    ) -> None:
        """`work` is how many times the plain work ours does; `prepare` runs before each of ours, untimed."""
        times: list[float] = []

        def time_plain() -> None:
            start = time.process_time()
            plain()
            times.append(time.process_time() - start)
            prepare()

        time_plain()
        ours()
        times.clear()
        benchmark.pedantic(ours, setup=time_plain, rounds=rounds)
        own = benchmark.stats.stats.min
        benchmark.extra_info |= {"plain_seconds": min(times), "ratio": work * min(times) / own}
        request.config.stash[ROWS].append((name, min(times), own, work * min(times) / own))

    return compare


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    table = ["| what | plain (ms) | ours (ms) | ratio |", "|---|---:|---:|---:|"]
    table += [
        f"| {name} | {1000 * plain:.4g} | {1000 * own:.4g} | {ratio:.1f} |"
        for name, plain, own, ratio in config.stash[ROWS]
    ]
    machine = f"{_processor()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    terminalreporter.write_line("\n".join([*table, machine]))
    if config.option.table is not None:
        config.option.table.write_text(
            "\n".join([HEADER, *table, "", f"Measured on: {machine}.\n"])
        )


def _processor() -> str:
    from cpuinfo import get_cpu_info

    return get_cpu_info().get("brand_raw", platform.machine())
