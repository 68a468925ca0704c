"""Checkpoints: everything that a killed run needs to continue bit for bit.

Orbax writes a checkpoint into a temporary folder and renames it when it is complete, so readers
never see a part of one. Each has the state, the position in the data, the losses so far, the
settings, and the plans of attention: as values, and as the text of `explain()`. It names no class
and no module, so that code may move. `export` writes the trained weights in diffusers' format.

A run that starts again keeps the earlier checkpoints until its own first one: it sets them aside
then, and deletes them when its own is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from flax import nnx

import maxattn as ma
from maxattn import weights
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.weights.replacing import locked, replacing
from maxattn_examples.common import hosts
from maxattn_examples.common.pipeline_folder import FIRST, SECOND, read_mapping, saying, write_json
from maxattn_examples.samplers.sampler import CLASSES

from . import lora
from .settings import TrainingSettings
from .task import Fixed, Task

Facts = dict[str, Any]
NOTHING: Facts = {"losses": [], "plans": {}}
REMEDY = "set it back, give another training.output_dir, or start again with training.resume=false"


class Checkpoints:
    """The checkpoints of `training.output_dir`, and the facts of the last one.

    Args:
        training: gives output_dir and the number of checkpoints to keep.
        more: facts beside the settings that must stay equal, by the key that an error names.
        start_again: start at step 0, and replace earlier checkpoints by the first that is saved.
        writes: whether this run saves; if not, it reads the last checkpoint, and another run may
            save.

    Raises:
        ConfigErrors: the last checkpoint has other values of these, or another run writes to
            output_dir.
    """

    def __init__(
        self,
        settings: Any,
        training: TrainingSettings,
        fixed: Fixed,
        more: Mapping[str, Any] | None = None,
        start_again: bool = False,
        writes: bool = True,
    ) -> None:
        self._writes = writes
        self.settings, self.more = settings, dict(more or {})
        self.folder = Path(training.output_dir).absolute() / "checkpoints"
        self._keep = training.keep_checkpoints
        self._open: ocp.CheckpointManager | None = None
        self._held = ExitStack()
        self._by_first(self._claim, "earlier checkpoints back")
        self.replaced = steps_in(self.folder) if start_again else []
        self.step, self.facts = 0, NOTHING
        if start_again:
            return
        self.step = self._manager.latest_step() or 0
        if self.step:
            self.facts = self._read_facts()
        if self.step and (problems := list(self._differences(fixed))):
            self._close()
            raise ConfigErrors(problems)

    @property
    def _manager(self) -> ocp.CheckpointManager:
        """The manager that reads and writes; the first access makes the folder."""
        if self._open is None:
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, create=True)
            self._open = ocp.CheckpointManager(self.folder, options=options)
        return self._open

    def _claim(self, folder: Path) -> None:
        """Lock the run's folder to write; restore checkpoints set aside by a run that has ended."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        is_free = self._held.enter_context(locked(folder.parent, wait=False))
        if is_free is False and self._writes:
            rule = "one run at a time writes to it, and another does"
            remedy = "wait until that one ends, or give another training.output_dir"
            raise ConfigErrors([ConfigError("training.output_dir", folder.parent, rule, remedy)])
        if is_free is not False:
            bring_back(folder)
        if not self._writes:
            self._held.close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._held.close()

    def _by_first(self, change: Callable[[Path], None], done: str) -> None:
        """Change folders in the first process, while the others wait."""
        if hosts.is_first():
            change(self.folder)
        hosts.wait(done)

    def _differences(self, fixed: Fixed) -> Iterator[ConfigError]:
        kept = Fixed((*fixed.keys, "more"), fixed.free)
        return differences(self.facts["settings"], self._settings(), kept, self.folder)

    def _settings(self) -> dict[str, Any]:
        return self.settings.resolved() | {"more": self.more}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._close()

    def _read_facts(self) -> Facts:
        facts = self._restored("facts", ocp.args.JsonRestore())
        kinds = {"settings": dict, "losses": list, "plans": dict}
        if not isinstance(facts, dict):
            raise self._damaged("its facts are not a mapping")
        for key, kind in kinds.items():
            if not isinstance(facts.get(key), kind):
                raise self._damaged(f"its facts have no {key}")
        return facts

    def _restored(self, part: str, how: Any) -> Any:
        """Read one item of the last checkpoint.

        Raises:
            ConfigErrors: the checkpoint is damaged.
        """
        try:
            return self._manager.restore(self.step, args=ocp.args.Composite(**{part: how}))[part]
        except Exception as error:  # of orbax, of its storage, of JSON
            raise self._damaged(f"{type(error).__name__}: {str(error)[:200]}") from error

    def _damaged(self, said: str) -> ConfigErrors:
        self._close()
        rule = f"a checkpoint is complete, and reading this one failed: {said}"
        remedy = "delete this folder: the run continues from the checkpoint before it"
        folder = self.folder / str(self.step)
        return ConfigErrors([ConfigError("training.output_dir", folder, rule, remedy)])

    @property
    def losses(self) -> list[float]:
        """The loss of every step up to the last checkpoint."""
        return list(self.facts["losses"])

    def load(self, like: Any) -> Any:
        """Return the arrays of the last checkpoint, with the shardings of `like`."""

        def wanted(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        return self._restored("state", ocp.args.StandardRestore(jax.tree.map(wanted, like)))

    def save(
        self, state: Any, position: Any, losses: list[float], plans: dict[str, ma.Plan]
    ) -> None:
        """Save after the last step of `losses`, in the background.

        If the run replaces earlier checkpoints, wait for its first save.

        Args:
            position: in the data, from the iterator's `get_state()`.
        """
        facts = {
            "settings": self._settings(),
            "data": position,
            # A copy: it is written during the next steps, whose losses the caller appends.
            "losses": list(losses),
            "plans": {role: plan.to_dict() for role, plan in plans.items()},
            "attention": {role: plan.explain().splitlines() for role, plan in plans.items()},
        }
        parts = {"state": ocp.args.StandardSave(state), "facts": ocp.args.JsonSave(facts)}
        how = ocp.args.Composite(**parts)
        if not self.replaced:
            self._manager.save(len(losses), args=how)
            return
        self._by_first(set_aside, "earlier checkpoints set aside")
        self._manager.save(len(losses), args=how)
        self._manager.wait_until_finished()
        self._by_first(forget, "earlier checkpoints deleted")
        self.replaced = []


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], fixed: Fixed, folder: Path
) -> Iterator[ConfigError]:
    """Yield one error for each fixed value that differs from the checkpoint's."""
    then, here = dict(flat(saved)), dict(flat(now))
    changed = (key for key in sorted(then.keys() | here.keys()) if then.get(key) != here.get(key))
    for key in changed:
        if key.startswith(fixed.keys) and not key.startswith(fixed.free):
            made = f"the checkpoint in {folder} was made with {then.get(key)}"
            rule = f"{made}, and continues only with that"
            yield ConfigError(key.removeprefix("more."), here.get(key), rule, REMEDY)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def steps_in(folder: Path) -> list[int]:
    """List the steps of the whole checkpoints in a folder, which may not be there."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())


def beside(folder: Path) -> Path:
    """Return the folder for checkpoints that are set aside."""
    return folder.with_name(f"{folder.name}.earlier")


def is_there(folder: Path) -> bool:
    """Check whether a folder of checkpoints exists, set aside or not."""
    return folder.is_dir() or beside(folder).is_dir()


def set_aside(folder: Path) -> None:
    """Rename a folder of checkpoints, so that another run can write its own there."""
    if folder.exists():
        folder.rename(beside(folder))


def forget(folder: Path) -> None:
    """Delete the checkpoints that were set aside."""
    shutil.rmtree(beside(folder), ignore_errors=True)


def bring_back(folder: Path) -> None:
    """Restore checkpoints set aside by a run that ended before its own first one was complete."""
    if not beside(folder).is_dir():
        return
    if not steps_in(folder):
        shutil.rmtree(folder, ignore_errors=True)
        beside(folder).rename(folder)
    forget(folder)


# ---- the exported result -------------------------------------------------------------------------

LORA_FILE = "pytorch_lora_weights.safetensors"
# diffusers reads those of a second transformer under the first one's names (its argument
# load_into_transformer_2): only the file's name differs.
SECOND_LORA_FILE = "pytorch_lora_weights_2.safetensors"
CONFIG = "config.json"


def export(task: Task, model: nnx.Module, folder: Path) -> Path | None:
    """Write a model to `folder`, or with LoRA only the LoRA file.

    Returns:
        The folder or file; None in a run of several processes, each of which has a part of every
        parameter.
    """
    if task.training.lora_rank:
        name = SECOND_LORA_FILE if task.part == SECOND else LORA_FILE
        return _lora(task, model, folder / name)
    if jax.process_count() > 1:
        return None
    whole = folder / task.part
    if task.training.export_dtype is not None:
        model = _stored(model, task.training.export_dtype)
    weights.save_diffusers(model, whole)
    _config(task, whole)
    if task.sampler is not None:  # the folder is sampled as the model was trained
        said = {"_class_name": CLASSES[task.sampler.name], **task.sampler.options}
        write_json(folder / "scheduler" / "scheduler_config.json", said)
    return whole


def _stored(model: nnx.Module, dtype: str) -> nnx.Module:
    """Return the model with matrices in this dtype; norms, biases and tables keep theirs."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    flat = [
        (path, param.replace(param.get_value().astype(dtype)) if path[-1] == "kernel" else param)
        for path, param in nnx.to_flat_state(params)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat), rest)


def _lora(task: Task, model: nnx.Module, path: Path) -> Path:
    from safetensors.numpy import save_file

    prefix = FIRST if task.part == SECOND else task.part
    tensors = lora.to_diffusers(model, f"{prefix}.")  # every process takes part in gathering
    if hosts.is_first():
        with replacing(path) as beside:
            save_file(tensors, beside, metadata={"format": "pt"})
    return path


def _config(task: Task, whole: Path) -> None:
    """Write config.json: the initial folder's values, the sizes, and the frames per block."""
    given, sizes = task.folder, task.sizes
    if given is not None:
        said = read_mapping(given / CONFIG)
    else:
        said = {} if sizes is None else sizes.config()
    write_json(whole / CONFIG, saying(said, task.frames_per_block))
