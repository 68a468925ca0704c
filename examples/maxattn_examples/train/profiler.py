"""Records a profile of some training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

import maxattn as ma
from maxattn.errors import escaped


class Profiler:
    """Record the steps that `enable_profiler` and its companions ask for.

    Args:
        settings: the profiler's keys.
        folder: where to.
        first: the first step of this run.
    """

    def __init__(self, settings: ma.AttentionConfig, folder: Path, first: int) -> None:
        self.folder = folder
        start = first + settings.skip_first_n_steps_for_profiler
        count = settings.profiler_steps if settings.enable_profiler else 0
        self.steps = range(start, start + count)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record this step, if it is one of those asked for."""
        if step in self.steps[:1]:
            jax.profiler.start_trace(str(self.folder))
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step in self.steps[-1:]:
            jax.profiler.stop_trace()
            where = escaped(str(self.folder))
            print(f"profile of steps {self.steps[0]} to {self.steps[-1]} in {where}")
