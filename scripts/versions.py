"""The fast tests with the lowest versions that pyproject.toml allows, and with the newest ones under each Python.

`python -m scripts.versions UV FOLDER` makes an environment for each in FOLDER with uv, runs the fast tests
there and prints a table. One for which no processor build of torch can be had is listed as not tested; a CUDA
build is never downloaded. A lower bound of pyproject.toml that no resolution reaches is a failure.
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
LOWEST = "lowest-direct"
FAST = "not slow and not exhaustive"
SUMMARY = re.compile(r"^(?:=+ )?(\d+ (?:failed|passed|error).* in [\d.]+s.*?)(?: =+)?$", re.M)
# Old versions warn of what newer ones have changed since.
OLD = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]


def requirements(uv: str, python: str, resolution: str) -> str:
    """The pinned requirements of one environment, with a processor build of torch.

    It is looked for where PyTorch publishes such builds, and else among the files of UV_FIND_LINKS.

    Raises:
        LookupError: If there is no such build.
    """
    command = [uv, "pip", "compile", str(ROOT / "pyproject.toml"), "--quiet", "--no-header"]
    command += ["--extra", "dev", "--python-version", python, "--resolution", resolution]
    online = subprocess.run([*command, "--torch-backend", "cpu"], capture_output=True, text=True)
    if online.returncode == 0:
        return online.stdout
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert torch, "constraints.txt names no torch"
    command += ["--constraints", "-"]
    local = subprocess.run(command, capture_output=True, text=True, input=f"{torch[0]}+cpu\n")
    if local.returncode == 0:
        return local.stdout
    if "torch==" in local.stderr:
        raise LookupError(f"no processor build of torch for Python {python}")
    raise RuntimeError(local.stderr)


def untrue_bounds(pinned: str) -> list[str]:
    """Lower bounds of pyproject.toml below the lowest versions that can be installed together."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = project["dependencies"] + project["optional-dependencies"]["dev"]
    lowest = dict(re.match(r"([\w.-]+)>=([\w.]+)", bound).groups() for bound in bounds)
    found = dict(re.findall(r"^([\w.-]+)==([\w.]+)", pinned, re.M))
    untrue = [
        f"{name}>={least} (reached: {found[name]})"
        for name, least in lowest.items()
        if numbers(found[name]) != numbers(least)
    ]
    return untrue


def numbers(version: str) -> list[str]:
    return re.sub(r"(\.0)+$", "", version).split(".")


def environment(uv: str, folder: Path, python: str, resolution: str) -> tuple[Path, str]:
    """An environment with the package's requirements, and the list of these."""
    pinned = requirements(uv, python, resolution)
    place = folder / f"python-{python}-{resolution}"
    if not (place / "bin" / "python").exists():
        subprocess.run([uv, "venv", "--quiet", "--python", python, str(place)], check=True)
    variables = os.environ | {"VIRTUAL_ENV": str(place)}
    sync = [uv, "pip", "sync", "--quiet", "-"]
    subprocess.run(sync, check=True, input=pinned, text=True, env=variables)
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT)]
    subprocess.run(install, check=True, env=variables)
    return place, pinned


def tested(uv: str, folder: Path, python: str, resolution: str) -> tuple[str, bool]:
    """What came out of one environment, and whether it may stay so."""
    try:
        place, pinned = environment(uv, folder, python, resolution)
    except (LookupError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"not tested: {error}", isinstance(error, LookupError)
    untrue = untrue_bounds(pinned) if resolution == LOWEST else []
    if untrue:
        return f"bounds that cannot be reached: {', '.join(untrue)}", False
    command = [str(place / "bin" / "python"), "-m", "pytest", "-n", "2", "-m", FAST, *OLD]
    log = folder / f"python-{python}-{resolution}.log"
    with log.open("w", encoding="utf-8") as output:
        run = subprocess.run([*command, *sys.argv[3:]], stdout=output, stderr=output, cwd=ROOT)
    counts = SUMMARY.findall(log.read_text("utf-8"))
    outcome = counts[-1] if counts else f"pytest ended with {run.returncode}"
    return f"{outcome} ({log})" if run.returncode else outcome, run.returncode == 0


def main(uv: str, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    # The lowest versions are older than the newer Pythons.
    for python, resolution in [(PYTHONS[0], LOWEST), *((python, "highest") for python in PYTHONS)]:
        outcome, passed = tested(uv, folder, python, resolution)
        good = good and passed
        print(f"Python {python}  {resolution:13}  {outcome}", flush=True)
    stamp("versions")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
