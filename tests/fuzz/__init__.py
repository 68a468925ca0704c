"""A fuzzer: drawn calls, plans, files and command lines, each of them right or refused.

`make fuzz SEED=1 SECONDS=600` draws until the time is up; `make fuzz CASE=attention:17` runs one
case again. It shares no definition with maxattn: the masks, which tests/masks compares with too,
the attention in float64 and the readers of files are its own. A new category is a function that
draws a case, and one line in `CATEGORIES` of loop.py; `SWITCHES` there are settings of jax under
which cases also run. `KNOWN` in run.py lists faults that are not mended yet.
"""
