"""Common imports of the scripts for figures and tables."""

from analyses.lib.measured import RESULTS, SETTING, Measured, checkpoint, failures, shipped, trained
from analyses.lib.records import Record, claims, record, records

__all__ = ["RESULTS", "SETTING", "Measured", "Record", "checkpoint", "claims", "record"]
__all__ += ["failures", "records", "shipped", "trained"]
