"""Writes the suite of known answers as one archive of safetensors and JSON that numpy alone can read.

Run: python -m analyses.known.export FOLDER [--suite VERSION] [--trained bundled|all|none]"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import torch
from safetensors.numpy import save as safetensors_of

from mechinterp.checkpoints.io.files import write_new
from mechinterp.checkpoints.load import load
from mechinterp.known import Entry, Suite, suite
from mechinterp.known.submissions import require_absent
from mechinterp.known.truth import TRUTH_NAMES

HERE = Path(__file__).parent
README, DOCUMENT, TRUTHS = "README.md", "suite.json", "truths.safetensors"
"""Files of the archive, besides a file of weights and one of prompts for each entry."""
DATE = (1980, 1, 1, 0, 0, 0)
"""Date of all files, so that the same suite gives the same bytes."""


def export(known: Suite, folder: Path) -> Path:
    """Write the archive of a suite to a folder; returns its path.

    Raises:
        CheckpointError: If the archive exists.
    """
    out = folder / f"known-answers-{known.version}.zip"
    require_absent(out)
    arrays: dict[str, np.ndarray] = {}
    entries = {name: document_of(entry, arrays) for name, entry in known.items()}
    document = {"version": known.version, "sha256": known.hash, "entries": entries}
    readme = (HERE / "archive_readme.md").read_text(encoding="utf-8")

    def write(file: Path) -> None:
        with ZipFile(file, "w") as archive:
            put(archive, README, readme.replace("ARCHIVE", out.name).encode())
            put(archive, DOCUMENT, json.dumps(document, indent=1, allow_nan=False).encode())
            put(archive, TRUTHS, safetensors_of(arrays))
            for name, entry in known.items():
                put(archive, f"weights/{name}.safetensors", safetensors_of(weights_of(entry)))
                put(archive, f"prompts/{name}.safetensors", safetensors_of(prompts_of(entry)))

    write_new(out, write)
    return out


def put(archive: ZipFile, name: str, content: bytes) -> None:
    archive.writestr(ZipInfo(name, DATE), content, ZIP_DEFLATED)


def document_of(entry: Entry, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """JSON document of an entry; arrays of its truth are added to the given ones, under "ENTRY/ANSWER"."""
    truth: dict[str, dict[str, Any]] = {}
    for name in TRUTH_NAMES:
        if (known := getattr(entry.truth, name)) is None:
            continue
        stated: dict[str, Any] = {"how": known.how, "error": known.error}
        values = known.value if isinstance(known.value, Mapping) else {"": known.value}
        for part, value in values.items():
            full = "/".join(filter(None, (entry.name, name, part)))
            if isinstance(value, np.ndarray):
                arrays[full] = np.ascontiguousarray(value, dtype=float)
                stated.setdefault("arrays", []).append(full)
            else:
                stated["value"] = value
        truth[name] = stated
    model = asdict(entry.checkpoint.config.model) | {"scale": entry.checkpoint.weights.scale}
    edges = entry.edges()[["from", "to"]].to_numpy().tolist()
    return {
        "kind": entry.kind,
        "model": plain(model),
        "task": plain(asdict(entry.task)),
        "edges": edges,
        "truth": truth,
    }


def plain(value: Any) -> Any:
    """Value as JSON has it: infinite numbers become texts."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def weights_of(entry: Entry) -> dict[str, np.ndarray]:
    """Tensors of the model by name, as its file has them."""
    tensors = load(entry.path).weights.tensors
    return {name: array(each) for name, each in tensors.items()}


@torch.no_grad()
def prompts_of(entry: Entry) -> dict[str, np.ndarray]:
    """The clean and the corrupted prompts of the effects, and the model's predictions on both."""
    found = {}
    for name, prompts in zip(("clean", "corrupted"), entry.pairs, strict=True):
        fields = {field: getattr(prompts, field) for field in ("x", "y", "x_query", "y_query")}
        fields["prediction"] = entry.checkpoint.predictor.predict(prompts)
        found |= {f"{name}/{field}": array(each) for field, each in fields.items()}
    return found


def array(values: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(force=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suite", type=int, default=1, help="version of the suite")
    parser.add_argument("--trained", default="bundled", help="trained models: bundled, all or none")
    given = parser.parse_args()
    out = export(suite(given.suite, trained=given.trained), given.folder)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
