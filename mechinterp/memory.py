"""Estimates of the memory that prompts and a run over them need, and the memory that is available.

Runs larger than CHUNK_BYTES are split into chunks. The size of a chunk follows from the model and the prompts alone, so
that results do not depend on the machine. A run whose smallest chunk does not fit is refused with both numbers. Training
estimates the memory of its snapshots and packs itself (`training.train`, `training.run`).
"""

import os
import re
import sys
from pathlib import Path

from mechinterp.config import TaskConfig

if sys.platform != "win32":
    import resource

CHUNK_BYTES = 2**28
"""Largest size of the activations of one chunk of prompts, in bytes."""
UNLIMITED = 2**62
CHUNK = 256
"""Largest number of prompts at once on a processor, small enough for its cache, and even, because a resampled mask swaps
prompts in pairs. On other devices memory alone limits it, since every chunk starts the same number of kernels."""
CONTROL_GROUP = Path("/sys/fs/cgroup")


def prompt_bytes(task: TaskConfig, *, context_length: int | None = None, width: int = 4) -> int:
    """Bytes of the random numbers that one prompt needs.

    Args:
        width: Bytes of a number.
    Example:
        >>> prompt_bytes(TaskConfig(d_x=5, context_length=40)) // 4
        251
    """
    n_tokens = 1 + (task.context_length if context_length is None else context_length)
    return width * (n_tokens * (task.d_x + task.d_y) + task.d_x * task.d_y)


def layers_bytes(
    *, n_layers: int, n_heads: int, d_head: int, d_model: int, d_mlp: int, n_tokens: int, width: int
) -> int:
    """Bytes per prompt of a model of several layers: six squares of scores per head, and the streams that are kept."""
    columns = n_heads * d_head
    layer = n_tokens * (4 * columns + 4 * d_model + 3 * d_mlp)
    kept = n_layers * n_tokens * (d_model + columns)
    return width * (6 * n_heads * n_tokens**2 + layer + kept)


def together(per_prompt: int, what: str, *, most: int = UNLIMITED) -> int:
    """Number of prompts in a chunk: even, since resample ablation swaps prompts in pairs.

    Raises:
        ValueError: If not even two fit.
    Example:
        >>> together(10**6, "a run"), together(10**6, "a run", most=256)
        (268, 256)
    """
    require_memory(2 * per_prompt, f"{what}, two prompts at once")
    return max(2, min(most, CHUNK_BYTES // max(1, per_prompt)) // 2 * 2)


def chunks(n_prompts: int, size: int) -> list[slice]:
    """Slices of `size` prompts each.

    Example:
        >>> chunks(5, 4)
        [slice(0, 4, None), slice(4, 8, None)]
    """
    return [slice(start, start + size) for start in range(0, n_prompts, size)]


def require_memory(needed: int, what: str) -> None:
    """Refuse a computation that needs more memory than is available; sizes up to one chunk always pass.

    Raises:
        ValueError: With the bytes needed and the bytes available.
    """
    if needed <= CHUNK_BYTES:
        return
    available = available_memory()
    if needed > available:
        raise ValueError(
            f"{what} must fit into memory: {needed} bytes are needed, {available} bytes are available."
        )


def available_memory() -> int:
    """Bytes that this process can still allocate: the least of machine, control group and process limit."""
    return max(0, min(_of_machine(), _of_control_group(), _of_process()))


def peak_memory() -> int:
    """Peak memory of this process so far, in bytes."""
    # On Linux a process starts with the ru_maxrss of the one that started it.
    if peak := re.search(r"VmHWM:\s+(\d+) kB", _read(Path("/proc/self/status"))):
        return 1024 * int(peak[1])
    if sys.platform == "win32":
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _of_machine() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return UNLIMITED


def _of_control_group() -> int:
    limit, used = (_read(CONTROL_GROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdigit() and used.isdigit()):
        return UNLIMITED
    # Pages of files count as used, and are given back when they are needed.
    lines = (line.split() for line in _read(CONTROL_GROUP / "memory.stat").splitlines())
    files = sum(int(value) for name, value in lines if name == "inactive_file")
    return int(limit) - int(used) + files


def _of_process() -> int:
    if sys.platform == "win32":
        return UNLIMITED
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _read(Path("/proc/self/statm")).split()
    if limit == resource.RLIM_INFINITY or not used:
        return UNLIMITED
    return limit - int(used[0]) * resource.getpagesize()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
