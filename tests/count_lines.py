"""Counts the lines of code of the package, as formatted: no blank lines, comments or docstrings.

`python -m tests.count_lines` prints them, a line per folder.
"""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mechinterp"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Lines of code in a source text; the string below a field counts as a docstring."""
    lines = dict(enumerate(source.splitlines(), start=1))
    for node in ast.walk(ast.parse(source)):
        for statement in node.body if isinstance(node, DOCUMENTED) else ():
            if isinstance(statement, ast.Expr) and _is_text(statement.value):
                for number in range(statement.lineno, statement.end_lineno + 1):
                    lines.pop(number, None)
    return sum(1 for line in lines.values() if line.strip() and not line.strip().startswith("#"))


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def main() -> None:
    counts: Counter[str] = Counter()
    for file in sorted(PACKAGE.rglob("*.py")):
        folder = file.relative_to(PACKAGE).parent
        counts[str(folder)] += code_lines(file.read_text(encoding="utf-8"))
    for folder, count in counts.items():
        print(f"{count:6} {'mechinterp' if folder == '.' else folder}")
    print(f"{counts.total():6} in all")


if __name__ == "__main__":
    main()
