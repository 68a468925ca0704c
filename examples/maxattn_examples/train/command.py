"""Shared by the commands that train: they read settings, join processes and begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maxattn_examples.common import hosts
from maxattn_examples.common.command import SettingsClass, settings_of, user_errors
from maxattn_examples.common.pipeline_folder import Family

from .loop import Training


def command(
    description: str | None,
    family: Family,
    settings_class: SettingsClass,
    main: Callable[[Any], None],
) -> None:
    """Run a command, and end on a user's mistake with a message alone.

    Args:
        description: what it does.
        family: of its models.
        settings_class: reads the YAML file.
        main: is given the settings.
    """
    with user_errors():
        settings = settings_of(description, settings_class, family=family)
        with hosts.first_speaks():
            main(settings)


def train(kind: Any, settings: Any) -> None:
    """Train what the settings describe.

    Args:
        kind: of task, whose `of` takes the settings.
        settings: of everything.
    """
    Training(kind.of(settings), settings.make_mesh()).run()
