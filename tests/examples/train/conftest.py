"""One training run of the small model on one device, which several tests compare with."""

from __future__ import annotations

import logging
import sys
from contextlib import redirect_stdout
from io import StringIO
from logging.handlers import BufferingHandler
from typing import NamedTuple

import pytest
from maxattn_examples.digits.settings import Settings
from maxattn_examples.wan.model import WanTransformer3D

from tests.examples.conftest import small_settings, train


class Ran(NamedTuple):
    """A run of `small` settings: results of training, its output and its log."""

    settings: Settings
    model: WanTransformer3D
    losses: list[float]
    printed: str
    logged: set[str]


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Three steps from the start; tests may read the folder, but not change it."""
    settings = small_settings(tmp_path_factory.mktemp("ran") / "run")
    profile = {"enable_profiler": True, "profiler_steps": 1, "skip_first_n_steps_for_profiler": 1}
    settings = settings.replace(**profile)
    log, listening = logging.getLogger("maxattn"), BufferingHandler(10_000)
    before = log.level
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        # A plan that another test has met would not be announced again.
        patch.setattr(sys.modules["maxattn.announce"], "_logged", set())
        log.setLevel(logging.INFO)
        log.addHandler(listening)
        model, losses = train(settings)
        log.removeHandler(listening)
        log.setLevel(before)
    logged = {record.getMessage() for record in listening.buffer}
    return Ran(settings, model, losses, out.getvalue(), logged)
