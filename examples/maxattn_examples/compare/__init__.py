"""What shortcuts of sampling cost on a user's own model: runs that are compared clip by clip.

    report.py      a table, and a YAML file that sampling can be given (sampling.fast.measured)
    pictures.py    scores of decoded samples
    curve.py       how the numbers of dense runs change from step to step
    thresholds.py  what step caches need so that a share of the steps computes
    family.py      which models a command is about

Ways of sampling, and plain runs of the same cost, are in sample/arms.py; sample/runner.py runs one.
"""
