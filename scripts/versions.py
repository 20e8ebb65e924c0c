"""The fast tests with the lowest versions that pyproject.toml allows, and with the newest ones under each Python.

`python -m scripts.versions UV FOLDER` makes an environment for each in FOLDER with uv, runs the fast tests
there and prints a table. The lowest torch comes as a CUDA build (3 GB with its libraries) where no processor build can
be had; for a newest one this is listed as not tested. A lower bound of pyproject.toml that no resolution reaches is a
failure.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.evidence import stamp

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
FAST = "not slow and not exhaustive"
SUMMARY = re.compile(r"^(?:=+ )?(\d+ (?:failed|passed|error).* in [\d.]+s.*?)(?: =+)?$", re.M)
# As in `make test`, without checks of signatures; old versions warn of what newer ones have changed since.
OPTIONS = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
OPTIONS += ["-o", "addopts=--strict-markers"]


def requirements(uv: str, python: str, lowest: bool) -> str:
    """The pinned requirements of one environment.

    A processor build of torch is taken from PyTorch's own index or from the files of UV_FIND_LINKS; the lowest torch may be
    any build. Packages that pyproject.toml does not name are the newest that go with the others.

    Raises:
        LookupError: If there is no processor build of the newest torch.
    """
    command = [uv, "pip", "compile", str(ROOT / "pyproject.toml"), "--quiet", "--no-header"]
    command += ["--extra", "dev", "--python-version", python, "--constraints", "-"]
    pins = lowest_versions() if lowest else []
    found = compiled([*command, "--torch-backend", "cpu"], pins)
    if found.returncode:
        found = compiled(command, pins or [torch_here()])
    if found.returncode == 0:
        return found.stdout
    if not lowest and "torch==" in found.stderr:
        raise LookupError(f"no processor build of torch for Python {python}")
    raise RuntimeError(found.stderr)


def compiled(command: list[str], pins: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, input="\n".join(pins))


def lowest_versions() -> list[str]:
    """The lower bounds of pyproject.toml as these very versions; where a package has two, the one of the extra `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = project["dependencies"] + project["optional-dependencies"]["dev"]
    least = dict(re.match(r"([\w.-]+)>=([\w.]+)", bound).groups() for bound in bounds)
    return [f"{name}=={version}" for name, version in least.items()]


def torch_here() -> str:
    """The processor build of the torch that constraints.txt names."""
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert torch, "constraints.txt names no torch"
    return f"{torch[0]}+cpu"


def environment(uv: str, place: Path, python: str, lowest: bool) -> None:
    """An environment with the package's requirements."""
    pinned = requirements(uv, python, lowest)
    if not (place / "bin" / "python").exists():
        subprocess.run([uv, "venv", "--quiet", "--python", python, str(place)], check=True)
    variables = os.environ | {"VIRTUAL_ENV": str(place)}
    sync = [uv, "pip", "sync", "--quiet", "-"]
    subprocess.run(sync, check=True, input=pinned, text=True, env=variables)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT)]
    subprocess.run(install, check=True, env=variables)


def tested(uv: str, place: Path, python: str, lowest: bool) -> tuple[str, bool]:
    """What came out of one environment, and whether it may stay so."""
    try:
        environment(uv, place, python, lowest)
    except (LookupError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"not tested: {error}", isinstance(error, LookupError)
    command = [
        str(place / "bin" / "python"),
        "-m",
        "pytest",
        "-n",
        "2",
        "-m",
        FAST,
        *OPTIONS,
        "tests",
    ]
    log = place.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        run = subprocess.run([*command, *sys.argv[3:]], stdout=output, stderr=output, cwd=ROOT)
    counts = SUMMARY.findall(log.read_text("utf-8"))
    outcome = counts[-1] if counts else f"pytest ended with {run.returncode}"
    return f"{outcome} ({log})" if run.returncode else outcome, run.returncode == 0


def main(uv: str, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    # The lowest versions are older than the newer Pythons.
    for python, lowest in [(PYTHONS[0], True), *((python, False) for python in PYTHONS)]:
        versions = "lowest" if lowest else "newest"
        outcome, passed = tested(
            uv, folder / f"{versions}-{python.replace('.', '')}", python, lowest
        )
        good = good and passed
        print(f"Python {python}  {versions} versions  {outcome}", flush=True)
    stamp("versions")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
