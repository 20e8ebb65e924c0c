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
    ran = subprocess.run(query, capture_output=True, text=True, check=False)
    return ran.stdout.split("\n")[:-1] if ran.returncode == 0 else []


def state(names: list[str]) -> tuple[int, str]:
    """The exit code, and the line."""
    if torch.cuda.is_available():
        devices = ", ".join(
            torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())
        )
        return READY, f"Found {devices} (PyTorch {torch.__version__}, CUDA {torch.version.cuda})."
    if not names:
        return NO_DEVICE, "No CUDA device on this machine: nothing was tested."
    listed, version = ", ".join(names), torch.__version__
    if not torch.backends.cuda.is_built():
        return WRONG_BUILD, f"Found {listed}, but PyTorch {version} without CUDA."
    reason = "nothing was tested. See torch.cuda.init() for why."
    return NO_DEVICE, f"Found {listed}, which PyTorch {version} cannot use: {reason}"


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
