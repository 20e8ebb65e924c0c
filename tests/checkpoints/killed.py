"""A process that is killed while it writes a checkpoint."""

import signal
import subprocess
import sys
from pathlib import Path

WRITE = """
import os, signal, sys
from pathlib import Path
from mechinterp.checkpoints.io.locks import claimed

def half(file):
    file.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

with claimed(Path(sys.argv[1]), last="config.json") as claim:
    claim.write("snapshots/10.safetensors", lambda file: file.write_bytes(b"whole"))
    claim.write("model.safetensors", lambda file: file.write_bytes(b"whole"))
    claim.write("history.parquet", half)
"""


def killed_while_writing(folder: Path) -> None:
    """Leave in a folder what a kill in the middle of a checkpoint leaves."""
    ran = subprocess.run([sys.executable, "-c", WRITE, str(folder)], check=False)
    assert ran.returncode == -signal.SIGKILL
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert {".mechinterp", "snapshots/10.safetensors", "model.safetensors"} < names
    assert len([name for name in names if name.endswith(".tmp")]) == 1
