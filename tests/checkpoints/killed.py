"""A process that is killed while it writes a checkpoint."""

import signal
from pathlib import Path

from tests.conftest import python

WRITE = """
import os, signal, sys
from pathlib import Path
from mechinterp.checkpoints.io.locks import claimed

whole, left = os.link, [1, 1, 0]  # the lock's own file, the first of the checkpoint's, the second

def link(old, new):
    if not left.pop(0):
        os.kill(os.getpid(), signal.SIGKILL)
    whole(old, new)

os.link = link
with claimed(Path(sys.argv[1]), last="config.json") as claim:
    for name in ("model.safetensors", "history.parquet", "config.json"):
        claim.write(name, lambda file: file.write_bytes(b"whole"))
"""


def killed_while_writing(folder: Path) -> None:
    """Leave in a folder what a kill leaves between the first and the second file of a checkpoint."""
    assert python("-c", WRITE, folder).code == -signal.SIGKILL
    names = {path.name for path in folder.iterdir()}
    assert {".mechinterp", "model.safetensors"} < names
    assert len([name for name in names if name.endswith(".tmp")]) == 3
