"""What shortcuts of sampling cost on a user's own model: runs that are compared clip by clip.

arms.py      ways of sampling, and plain runs of the same cost
runs.py      one way of sampling, its trajectory and its error in single steps
report.py    a table, and a YAML file that sampling can be given
"""
