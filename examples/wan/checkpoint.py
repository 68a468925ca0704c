"""Checkpoints: everything that a killed run needs to go on as if it had not been.

Orbax writes a checkpoint into a temporary folder and renames it when it is whole, so a half-written one is never
seen. Each holds the state (parameters, their average, optimiser, step), the place in the data, the losses so far, the
settings it was made with and the plans of its attention.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grain
import jax
import orbax.checkpoint as ocp
from flax import nnx

from maxattn.config_errors import ConfigErrors
from maxattn.errors import ConfigError

from . import hosts
from .settings import Settings

KEPT = 2
# A checkpoint goes on only with these as they were; everything else may change between runs.
FIXED = ("model", "data", "training.batch_size", "training.seed")

Facts = dict[str, Any]


class Checkpoints:
    """Hold the checkpoints of `training.output_dir`, and know what is in the last one.

    Args:
        settings: of the run.
        start_again: delete what is there.

    Raises:
        ConfigErrors: the last checkpoint was made with another model, other data, another batch size or seed.
    """

    def __init__(self, settings: Settings, start_again: bool = False) -> None:
        self.settings = settings
        self.folder = Path(settings.training.output_dir).absolute() / "checkpoints"
        if start_again:
            if hosts.is_first():
                _forget(self.folder)
            hosts.wait("old checkpoints deleted")
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self.step = self._manager.latest_step() or 0
        self.facts: Facts = self._read_facts() if self.step else {"losses": [], "plans": {}}
        problems = tuple(differences(self.facts["settings"], settings, str(self.folder))) if self.step else ()
        if problems:
            self._manager.close()
            raise ConfigErrors(problems)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._manager.close()

    def _read_facts(self) -> Facts:
        return self._manager.restore(self.step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]

    @property
    def losses(self) -> list[float]:
        """The loss of every step up to the last checkpoint."""
        return list(self.facts["losses"])

    def load(self, state: nnx.Module, data: grain.DatasetIterator | None = None) -> None:
        """Put the last checkpoint into a state, where the state's arrays lie now, and into a data iterator."""
        here = nnx.to_pure_dict(nnx.state(state))
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), here)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        found = nnx.state(state)
        nnx.replace_by_pure_dict(found, self._manager.restore(self.step, args=args)["state"])
        nnx.update(state, found)
        if data is not None:
            data.set_state(self.facts["data"])

    def save(self, state: nnx.Module, data: grain.DatasetIterator, losses: list[float], plans: Facts) -> None:
        """Save after the last step of `losses`; the writing goes on behind the next steps."""
        facts = {"settings": self.settings.resolved(), "data": data.get_state(), "losses": losses, "plans": plans}
        arrays = nnx.to_pure_dict(nnx.state(state))
        args = ocp.args.Composite(state=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave(facts))
        self._manager.save(len(losses), args=args)


def _forget(folder: Path) -> None:
    """Delete a folder of checkpoints, never leaving half of one under its name."""
    doomed = folder.with_name(f"{folder.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    if folder.exists():
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def differences(saved: Mapping[str, Any], settings: Settings, folder: str) -> Iterator[ConfigError]:
    """Yield one error for each setting of `FIXED` that is not what the checkpoint was made with."""
    then, now = dict(flat(saved)), dict(flat(settings.resolved()))
    for key in sorted(then.keys() | now.keys()):
        if key.startswith(FIXED) and then.get(key) != now.get(key):
            rule = f"the checkpoint in {folder} was made with {then.get(key)}, and goes on only with that"
            remedy = "set it back, give another training.output_dir, or start again with training.resume=false"
            yield ConfigError(key, now.get(key), rule, remedy)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
