"""`training.resume=false` keeps the old checkpoints until the new run has saved its first one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from maxattn_examples.digits.settings import Settings
from maxattn_examples.train import checkpoint
from maxattn_examples.train.loop import Diverged

from maxattn.config import ConfigErrors
from tests.examples.conftest import train
from tests.golden_text import check_golden

from .conftest import Ran
from .test_damaged import made as made  # a fixture
from .test_damaged import opened
from .test_training import copied as copied  # a fixture


def again(settings: Settings, **changes: object) -> Settings:
    training = settings.training.replace(resume=False, **changes)
    return settings.replace(training=training)


def holds(folder: Path) -> list[int]:
    assert not checkpoint.beside(folder).exists(), "nothing is left beside it"
    return checkpoint.steps_in(folder)


@pytest.mark.slow
def test_its_first_checkpoint_replaces_those_of_the_run_before(ran: Ran, copied: Settings, capsys):
    folder = Path(copied.training.output_dir)
    _, losses = train(again(copied))
    said = capsys.readouterr().out.replace(str(folder), "FOLDER").splitlines()
    begun = next(i for i, line in enumerate(said) if line.startswith("training 3 steps"))
    check_golden("training/start_again", "\n".join(said[begun : begun + 2]))
    assert losses == ran.losses
    assert holds(folder / "checkpoints") == [2, 3]


@pytest.mark.slow
def test_a_run_that_fails_before_has_lost_none(copied: Settings) -> None:
    folder = Path(copied.training.output_dir) / "checkpoints"
    with pytest.raises(Diverged):
        train(again(copied, learning_rate=1e38, checkpoint_every=100, steps=20))
    assert holds(folder) == [2, 3], "the same command goes on with what was there"


def test_a_run_killed_in_its_first_checkpoint_has_lost_none(made: Path, tmp_path: Path) -> None:
    """The folders are in the state that a kill leaves after each step of the replacement."""
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(made, tmp_path / "run")
    checkpoint.set_aside(folder)
    for half_written in (False, True):
        if half_written:
            checkpoint.set_aside(folder)
            (folder / "1.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        with opened(tmp_path / "run") as checkpoints:
            assert (checkpoints.step, checkpoints.losses) == (2, [1.0, 0.5])
        assert holds(folder) == [2]
    shutil.copytree(folder, checkpoint.beside(folder))
    (checkpoint.beside(folder) / "2").rename(checkpoint.beside(folder) / "7")
    with opened(tmp_path / "run") as checkpoints:
        assert checkpoints.step == 2, "the new one is whole, so the earlier one is old"
    assert holds(folder) == [2]


def test_two_runs_do_not_save_into_one_folder(made: Path, tmp_path: Path) -> None:
    """The second run is refused; readers do not restore old checkpoints under the first."""
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    with opened(folder, start_again=True):
        for again in (False, True):
            with pytest.raises(ConfigErrors) as caught:
                opened(folder, start_again=again)
        check_golden("training/two_runs", str(caught.value).replace(str(tmp_path), "FOLDER"))
        with opened(folder, writes=False) as reader:
            assert reader.step == 2
        checkpoint.set_aside(folder / "checkpoints")
        with opened(folder, writes=False) as reader:
            assert reader.step == 0
        assert checkpoint.steps_in(checkpoint.beside(folder / "checkpoints")) == [2]
    with opened(folder) as checkpoints:
        assert checkpoints.step == 2
