"""Numbers in prose. A page marks each number, `<!-- v: start.ridge_helped -->0.667 ± 0.014<!-- /v
-->`, and the text between the marks comes from the results.

analyses/numbers.toml names the source of each number by group and name: a `record` and one of its
models; the `value` of a `table` of results (a column or a formula of columns) in the rows that
satisfy all conditions of `where`; the ratio in a row of the output of `make bench`; the number
of `files`; or the commit or day of `evidence`. The tables `gpu_results` and `gpu_speed` are those of `make test-gpu` and `make
bench-gpu`. `show` is its format. A fast test fills every page anew, so that a changed digit is
noticed."""

import json
import re
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from analyses.lib.measured import RESULTS, ROOT
from analyses.lib.records import all_records, span
from analyses.sparse.settings_table import table_of

BENCH = ROOT / "tests" / "benchmarks" / "README.md"
EVIDENCE = ROOT / "tests" / "evidence.json"
MARK = re.compile(r"<!-- v: ([\w.-]+) -->(.*?)<!-- /v -->", re.DOTALL)


@cache
def sources() -> dict:
    """The groups of analyses/numbers.toml."""
    return tomllib.loads((ROOT / "analyses" / "numbers.toml").read_text(encoding="utf-8"))


@cache
def table(name: str) -> pd.DataFrame:
    if name == "sparse_settings":
        return table_of(RESULTS)
    if name == "gpu_speed":
        return pd.DataFrame(gpu("speed")["rows"])
    if name == "gpu_results":
        document = gpu("results")
        return pd.DataFrame([document["machine"] | {"passed": document["passed"]}])
    return pd.read_csv(RESULTS / f"{name}.csv")


def gpu(name: str) -> dict:
    """Numbers that `make test-gpu` ("results") or `make bench-gpu` ("speed") has written."""
    return json.loads((ROOT / "tests" / "gpu" / f"{name}.json").read_text(encoding="utf-8"))


@cache
def records() -> dict:
    return {record.id: record for _, record in all_records(RESULTS)}


@cache
def ratios() -> dict[str, float]:
    """Speed of the package relative to plain code, by the first column of the page."""
    text = BENCH.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \|.*\| ([0-9.]+) \|$", text, re.MULTILINE)
    return {what: float(ratio) for what, ratio in rows}


def chosen(source: dict) -> pd.DataFrame:
    """Rows of a table that satisfy all conditions; a filter's name is replaced by its condition."""
    rows, filters = table(source["table"]), sources()["filters"]
    for condition in source.get("where", ()):
        rows = rows.query(filters.get(condition, condition))
    return rows


def measured(source: dict) -> tuple[np.ndarray, np.ndarray | None]:
    """Values of a number's source, and their standard errors if `show` needs them."""
    if "record" in source:
        record = records()[source["record"]]
        names = [source["model"]] if "model" in source else list(record.values)
        errors = np.array([record.errors.get(name, np.nan) for name in names])
        values = errors if source.get("errors") else np.array([record.values[n] for n in names])
        return values, errors
    if "bench" in source:
        return np.array(
            [v for what, v in ratios().items() if re.fullmatch(source["bench"], what)]
        ), None
    if "files" in source:
        found = [f for f in ROOT.glob(source["files"]) if f.parent.name[:5] != "pool-"]
        return np.array([len(found)]), None
    rows, value = chosen(source), source.get("value")
    if value is None:
        return np.arange(len(rows)), None
    wanted = "±" in source["show"]
    errors = rows[source.get("error", f"{value}_sem")].to_numpy() if wanted else None
    return rows.eval(value).to_numpy(dtype=float), errors


def number(name: str) -> str:
    """A number as text, with a minus sign if it is negative."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", _number(name))


def _number(name: str) -> str:
    """A number as Python formats it.

    `show` is a format for a single value. A word before the format takes several values: "range"
    from smallest to largest, "each" and "list" all, "sorted" all in order; "most", "least", "sum",
    "mean" and "median" reduce them to one. "count" is the number of values, "holding" the number
    that satisfies the record's bound. "text" shows a single cell as it is. "±" adds the standard error, with its own format if there is
    a second one.
    """
    group, _, key = name.partition(".")
    source = sources()[group][key]
    if "evidence" in source:
        found = json.loads(EVIDENCE.read_text(encoding="utf-8"))
        return found[source["evidence"]][source["value"]]
    if source["show"] == "text":
        return str(chosen(source)[source["value"]].item())
    values, errors = measured(source)
    values = values * source.get("times", 1)
    how, *formats = source["show"].split()
    if how == "holding":
        record = records()[source["record"]]
        return f"{len(record.holding)} of {record.n}"
    if how == "count":
        return f"{len(values):,}"
    if how == "range":
        return span(values, formats[0])
    if how in ("each", "list", "sorted"):
        texts = [f"{one:{formats[0]}}" for one in (sorted(values) if how == "sorted" else values)]
        return ", ".join(texts) if how == "list" else f"{', '.join(texts[:-1])} and {texts[-1]}"
    reduce = {"most": np.max, "least": np.min, "sum": np.sum, "mean": np.mean, "median": np.median}
    if how in reduce:
        return f"{reduce[how](values):{formats[0]}}"
    if len(values) != 1:
        raise ValueError(f"{name} must be one number, got {len(values)}.")
    if how == "±":
        assert errors is not None
        return f"{values[0]:{formats[0]}} ± {errors[0]:{formats[-1]}}"
    return f"{values[0]:{how}}"


def filled(text: str) -> str:
    """A page with every marked number filled in from the results."""
    return MARK.sub(lambda mark: f"<!-- v: {mark[1]} -->{number(mark[1])}<!-- /v -->", text)


def pages() -> list[Path]:
    """Pages with marks."""
    every = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("analyses/**/*.md")]
    return [page for page in sorted(every) if MARK.search(page.read_text(encoding="utf-8"))]


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
