"""Records a profile of some training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

import maxattn as ma


class Profiler:
    """Record `profiler_steps` steps, after `skip_first_n_steps_for_profiler`, where
    `enable_profiler` is set.

    Args:
        settings: the profiler's keys.
        folder: where to.
        first: the first step of this run.
    """

    def __init__(self, settings: ma.AttentionConfig, folder: Path, first: int) -> None:
        self.folder = folder
        start = first + settings.skip_first_n_steps_for_profiler
        self.steps = (
            range(start, start + settings.profiler_steps) if settings.enable_profiler else range(0)
        )

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record this step, if it is one of those asked for."""
        if step in self.steps[:1]:
            jax.profiler.start_trace(str(self.folder))
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step in self.steps[-1:]:
            jax.profiler.stop_trace()
            print(f"profile of steps {self.steps[0]} to {self.steps[-1]} in {self.folder}")
