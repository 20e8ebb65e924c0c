"""What an analysis returns, as the writers of JSON, text, pages and CSV files read it."""

from typing import Protocol, runtime_checkable

import pandas as pd
import plotly.graph_objects as go


@runtime_checkable
class Finding(Protocol):
    """What an analysis returns; its repr is a sentence."""

    def to_frame(self) -> pd.DataFrame: ...

    def plot(self) -> go.Figure: ...
