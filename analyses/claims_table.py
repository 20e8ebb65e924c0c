"""The table of claims in README.md, made from the *.claims.csv of all scripts.

python analyses/claims_table.py  (at once; every script of a figure or table must have run)
"""

from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
COLUMNS = {"id": "id", "claim": "claim", "script": "script", "models": "models", "paper": "paper", "ours": "ours", "holds": "verdict"}  # fmt: skip


def claims(results: Path) -> pd.DataFrame:
    """All rows, in the order of the scripts' names."""
    frames = []
    for file in sorted(results.glob("*.claims.csv")):
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)
        frames.append(frame.assign(script=f"`{file.name.removesuffix('.claims.csv')}.py`"))
    return pd.concat(frames)


def markdown(found: pd.DataFrame) -> str:
    """A Markdown table."""
    rows = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    rows += [[text.replace("|", "\\|") for text in row] for row in found[list(COLUMNS)].to_numpy()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def replaced(text: str, name: str, table: str) -> str:
    """The text with this table between the marks of that name.

    Example:
        >>> replaced("<!-- a: begin --><!-- a: end -->", "a", "| x |").splitlines()
        ['<!-- a: begin -->', '| x |', '<!-- a: end -->']
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main() -> None:
    file = HERE / "README.md"
    table = markdown(claims(HERE / "results"))
    file.write_text(replaced(file.read_text(encoding="utf-8"), "claims", table), encoding="utf-8")


if __name__ == "__main__":
    main()
