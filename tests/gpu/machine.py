"""What this machine has for tests on a GPU, in one line; `python -m tests.gpu.machine`.

The exit code is 0 where PyTorch can use a CUDA device, 3 where there is one but this PyTorch is built without CUDA,
and 77, which test runners take for "skipped", where there is none.
"""

import platform
import shutil
import subprocess
import sys

import torch

READY, WRONG_BUILD, NO_DEVICE = 0, 3, 77


def gpus() -> list[str]:
    """The CUDA devices as their driver lists them; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.split("\n")[:-1] if found.returncode == 0 else []


def state(names: list[str]) -> tuple[int, str]:
    """The exit code, and the line."""
    if torch.cuda.is_available():
        found = ", ".join(torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count()))
        return READY, f"Found {found} (PyTorch {torch.__version__}, CUDA {torch.version.cuda})."
    if names and not torch.backends.cuda.is_built():
        return (
            WRONG_BUILD,
            f"Found {', '.join(names)}, but PyTorch {torch.__version__} without CUDA.",
        )
    if names:
        return (
            NO_DEVICE,
            f"Found {', '.join(names)}, which PyTorch {torch.__version__} cannot use: "
            "nothing was tested. See torch.cuda.init() for why.",
        )
    return NO_DEVICE, "No CUDA device on this machine: nothing was tested."


def described(device: str) -> dict[str, str]:
    """The machine, for a table."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "device": device,
        "name": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }


if __name__ == "__main__":
    code, line = state(gpus())
    print(line)
    sys.exit(code)
