"""Training in this process: the changes of a step, checkpoints, and refused settings."""

from __future__ import annotations

import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.digits.settings import Settings
from maxattn_examples.digits.task import ClipTask
from maxattn_examples.train.checkpoint import Checkpoints
from maxattn_examples.train.loop import Training
from maxattn_examples.train.progress import Cost, Progress
from maxattn_examples.train.step import State
from rich.console import Console

from maxattn.errors import ConfigError
from tests.examples.conftest import train, trained

from .conftest import Ran


@pytest.fixture
def copied(ran: Ran, tmp_path: Path) -> Settings:
    """The settings of a copy of that run, which a test may change."""
    copy = shutil.copytree(ran.settings.training.output_dir, tmp_path / "run")
    settings = ran.settings.replace(enable_profiler=False)
    return with_training(settings, output_dir=str(copy))


def with_training(settings: Settings, **changes: object) -> Settings:
    return settings.replace(training=settings.training.replace(**changes))


def last(settings: Settings, mesh: jax.sharding.Mesh | None = None) -> State:
    return Training(ClipTask.of(settings), mesh).last()[1]


# test_train_models.py has the loss of Wan go down.
@pytest.mark.slow
def test_the_loss_goes_down(small: Settings):
    _, losses = train(
        with_training(small, steps=60, warmup_steps=5, learning_rate=1e-2, checkpoint_every=60)
    )
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:3])


def test_a_step_moves_parameters_and_their_average(ran: Ran):
    settings = ran.settings
    built: Any = ClipTask.of(settings).build(None, nnx.Rngs(settings.training.seed))
    untrained, state = built.patch_embedding.kernel[...], last(settings)
    trained_now, average = (x["patch_embedding"]["kernel"] for x in (state.trained, state.average))
    moved = np.abs(trained_now - untrained).max()
    assert moved > 1e-4
    assert 0.1 * moved < np.abs(average - untrained).max()
    assert np.abs(average - trained_now).max() > 0
    np.testing.assert_array_equal(ran.model.patch_embedding.kernel[...], average)


def test_what_is_planned_is_what_runs(ran: Ran):
    task = ClipTask.of(ran.settings)
    plans = task.plans(task.source().shapes, None)
    assert ran.logged == {plan.explain() for plan in plans.values()}


def test_a_complete_run_takes_no_step(ran: Ran, capsys: pytest.CaptureFixture[str]):
    _, losses = train(ran.settings)
    printed = capsys.readouterr().out
    assert "training is complete: 3 of 3 steps" in printed
    assert "step 1/" not in printed
    assert (int(last(ran.settings).step), len(losses)) == (3, 3)


def test_plans_are_printed_before_the_first_step(ran: Ran):
    lines = ran.printed.splitlines()
    titles, first = ("self-attention", "cross-attention"), "training 3 steps from the start"
    heads = [i for i, line in enumerate(lines) if line.startswith(titles)]
    begun = next(i for i, line in enumerate(lines) if line.startswith(first))
    assert len(heads) == 2
    assert max(heads) < begun
    assert sum("runs    dot_product" in line for line in lines) == 2
    assert lines[-1].startswith("step 3/3  loss ")


def test_a_checkpoint_holds_the_losses_up_to_its_step(small: Settings):
    losses = [1.0] * 20_000  # so many that their writing is under way when the next one comes
    with Checkpoints(small, ClipTask.of(small).training, ClipTask.fixed) as checkpoints:
        checkpoints.save({"x": np.zeros(2)}, {}, losses, {})
        losses += [2.0] * 1000
    with Checkpoints(small, ClipTask.of(small).training, ClipTask.fixed) as checkpoints:
        assert checkpoints.step == len(checkpoints.losses) == 20_000


def test_a_checkpoint_of_one_device_goes_on_over_eight(ran: Ran):
    spread = ran.settings.replace(ici_fsdp_parallelism=8)
    states = last(spread, spread.make_mesh()), last(ran.settings)
    kernels = [state.trained["blocks"]["ffn"]["up"]["kernel"] for state in states]
    assert kernels[0].addressable_shards[0].data.size == kernels[0].size // 8
    np.testing.assert_array_equal(*kernels)


@pytest.mark.slow
def test_training_goes_on_over_eight_devices(small: Settings, capsys: pytest.CaptureFixture[str]):
    _, alone = train(small)
    spread = with_training(small.replace(ici_fsdp_parallelism=8), steps=5)
    _, losses = train(spread, spread.make_mesh())
    printed = capsys.readouterr().out
    assert "going on from step 3 of 5" in printed
    assert "training.steps was 3" in printed
    assert "self-attention changed: mesh: {} -> {'fsdp': 8}" in printed
    assert losses[:3] == alone
    assert int(last(spread).step) == 5
    assert np.isfinite(losses).all()


OTHER = [
    ("model", {"ffn_dim": 48}, ("model.ffn_dim: 48", "was made with 32", "resume=false")),
    ("data", {"speed": 3}, ("12 pixels, 3, 6", "12 pixels, 2, 6")),
    ("training", {"batch_size": 16}, ("training.batch_size: 16", "was made with 8")),
    ("training", {"seed": 1}, ("training.seed: 1", "was made with 0")),
]


@pytest.mark.parametrize(("section", "changes", "words"), OTHER)
def test_a_checkpoint_of_other_settings_is_refused(
    ran: Ran, section: str, changes: dict[str, object], words: tuple[str, ...]
):
    part = getattr(ran.settings, section).replace(**changes)
    for begin in (train, trained):
        with pytest.raises(ConfigError) as error:
            begin(ran.settings.replace(**{section: part}))
        for word in (*words, ran.settings.training.output_dir):
            assert word in str(error.value)
    assert len(train(ran.settings)[1]) == 3, "nothing was lost"


def test_drawing_before_training_is_refused(small: Settings):
    with pytest.raises(ConfigError, match="train with the same config first"):
        trained(small)
    assert not Path(small.training.output_dir).exists()
    # As a run leaves it that ends before its first checkpoint is whole.
    (Path(small.training.output_dir) / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="train with the same config first"):
        trained(small)


def test_a_half_written_checkpoint_is_never_read(copied: Settings):
    folder = Path(copied.training.output_dir) / "checkpoints"
    half = folder / "9.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "state").write_text("half")
    assert int(last(copied).step) == 3


def test_a_profile_of_the_chosen_steps(ran: Ran):
    assert list((Path(ran.settings.training.output_dir) / "profile").rglob("*.xplane.pb"))


# ---- progress ------------------------------------------------------------------------------------


def test_lines_without_a_terminal(small: Settings, capsys: pytest.CaptureFixture[str]):
    training = ClipTask.of(with_training(small, steps=250, log_every=100)).training
    losses = [1.0] * 90
    console = Console(file=StringIO(), force_terminal=False)
    with Progress(training, Cost(tokens=160), 90, console) as progress:
        for _ in range(160):
            losses.append(0.5)
            progress.advance(losses)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["100/250", "200/250", "250/250"]
    assert "loss 0.9000" in lines[0]
    assert "loss 0.5000" in lines[1]
    timed = [line for line in lines if line.endswith(" left")]
    assert all(re.search(r"tokens/s  \d+:\d\d:\d\d left$", line) for line in timed)
    assert timed == lines[:2] and lines[2].endswith("tokens/s")
