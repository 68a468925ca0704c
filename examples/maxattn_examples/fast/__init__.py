"""Fewer forwards in sampling: what each step computes, and what it takes from an earlier one.

All of it is approximate, off unless `sampling.fast` asks for it, and named in what a run prints.

    settings.py   the section `sampling.fast`
    schedules.py  a cache's settings (cache_settings.py) -> one letter for each step
    curves.py     files of curves, which some schedules are computed from
    run_weights.py  the transformers and LoRA weights of a run, and whether a file is of them
    calibrated.py settings that were found on these weights, from such a file
    teacache.py   a schedule from how a model's embedding of the time changes
    steps.py      settings -> one `Step` for each step of a run, before anything runs
    deciding.py   steps that decide as they run: first-block cache, EasyCache
    reuse.py      a step's layers: computed, or what they added in an earlier step
    program.py    one step as a program for each kind of step
    guidance.py   predictions that are mixed
    table.py      the steps of a run as a table
"""
