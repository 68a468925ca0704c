"""Training: one loop for every model, which the loop knows only as a `Task`.

A program trains a model of its own by `train(task)`:

    import jax
    import jax.numpy as jnp
    import maxattn as ma
    from maxattn_examples.train import flow, train
    from maxattn_examples.train.data import LatentFolder
    from maxattn_examples.train.settings import DataSettings, TrainingSettings
    from maxattn_examples.train.task import Task

    class Settings(ma.AttentionConfig):
        data: DataSettings = DataSettings()
        training: TrainingSettings = TrainingSettings()

    class Mine(Task):
        settings = Settings.from_yaml("mine.yml")  # data: {folder: ...}, training: {...}

        def source(self):
            return LatentFolder(self.settings.data.folder)

        def build(self, mesh, rngs):
            return MyModel(self.settings, mesh, rngs=rngs)

        def noised(self, batch, empty, key):  # the inputs of the loss, drawn in each step
            for_times, for_noise = jax.random.split(key)
            t = flow.times(for_times, len(batch["latents"]), 3.0)  # 0 (clean) to 1 (noise)
            return flow.noised(batch["latents"], t, for_noise)._asdict()

        def loss(self, model, examples):
            velocity = model(examples["mixed"], examples["times"])
            return jnp.mean((velocity - examples["velocity"]) ** 2)

    model, losses = train(Mine())

Files: settings, task (the interface of a model), data (examples, in batches), step (and the arrays
that it updates), loop, checkpoint (and the exported result), progress (the bar, TensorBoard,
profiles, operations and MFU), samples, lora, flow and forcing (times and noise).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .task import Task


def train(task: Task) -> tuple[Any, list[float]]:
    """Train a task from its last checkpoint to its last step, on the mesh of its settings.

    Returns:
        The model, with averaged parameters if an average is kept, and the loss of every step.

    Raises:
        ConfigErrors: all errors of settings, data and mesh, before the first step.
        Diverged: the loss is not finite.
    """
    from .loop import Training  # optax, orbax and rich: sampling reads this folder without them

    return Training(task, task.settings.make_mesh()).run()
