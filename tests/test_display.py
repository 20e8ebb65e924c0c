"""How results show in a notebook."""

from dataclasses import dataclass

import pandas as pd

from mechinterp.display import ROWS, Result


@dataclass(frozen=True, eq=False, repr=False)
class Count(Result):
    n: int
    name: str = "rows"

    def __repr__(self) -> str:
        return f"Count({self.n} {self.name})"

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"row": range(self.n)})


def test_a_result_shows_its_sentence_and_the_first_rows_of_its_table():
    for n, shown in ((2, 2), (ROWS, ROWS), (ROWS + 3, ROWS)):
        html = Count(n)._repr_html_()
        assert f"Count({n} rows)" in html
        assert html.count("<tr") == 1 + shown
        assert ("3 more rows" in html) == (n > ROWS)
    assert "<img" not in Count(1, name="<img src=x onerror=alert(1)>")._repr_html_()
