"""Compare ways of sampling clip by clip, beside plain steps of equal cost.

`drift` takes callables of any program. The command reads ways.py (changes of one config), runner.py
(runs one), report.py (the table, tests and the file) and scores.py (more columns).
"""

from .report import drift

__all__ = ["drift"]
