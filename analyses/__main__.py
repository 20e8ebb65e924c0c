"""Measures claims: python -m analyses softmax/patterns [--quick] [--png] [--out DIR]; without a
name, lists the scripts.

A script F/S.py defines `measure(quick)`. Its output goes into results/: F_S.csv (data of the
figure), F_S.records.json (claims with measured values, see lib/records.py) and F_S.html (figures;
needs plotly.min.js beside it). `--quick` takes about a minute or less. `--png` writes PNGs too and
needs a browser."""

import argparse
import time
from pathlib import Path

import torch

from analyses.lib.measured import RESULTS, module_of, scripts, write


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m analyses", description=__doc__.splitlines()[0])
    parser.add_argument("script", nargs="?", help="name of a script, such as softmax/patterns")
    parser.add_argument("--quick", action="store_true", help="fewer prompts or steps")
    parser.add_argument("--png", action="store_true", help="write PNGs too; needs a browser")
    parser.add_argument("--out", type=Path, default=RESULTS, help="output folder")
    given = parser.parse_args(arguments)
    if given.script is None:
        print(*scripts(), sep="\n")
        return
    if given.script not in scripts():
        parser.error(f"script must be a name that `python -m analyses` lists, got {given.script}.")
    torch.set_num_threads(1)
    start = time.process_time()
    found = module_of(given.script).measure(given.quick)
    seconds = time.process_time() - start
    write(found, given.script.replace("/", "_"), given.out, png=given.png, seconds=seconds)


if __name__ == "__main__":
    main()
