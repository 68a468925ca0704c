"""A fuzzer: drawn calls, plans, files and command lines must give the right result or an error.

`make fuzz SEED=1 SECONDS=600` draws until the time is up; `make fuzz CASE=attention:17` runs one
case again. It shares no definition with maxattn: it has its own masks (which tests/masks uses too),
attention in float64, and readers of files. A new category is a function that draws a case, and one
line in `CATEGORIES` of loop.py; `SWITCHES` there are settings of jax under which cases also run.
`KNOWN` in run.py lists faults that are not fixed yet.
"""
