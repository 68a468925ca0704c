"""A program trains its own model by `train(task)`, with the defaults of `Task`."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from maxattn_examples.train import flow, train
from maxattn_examples.train.data import LatentFolder
from maxattn_examples.train.settings import DataSettings, TrainingSettings
from maxattn_examples.train.task import Task

import maxattn as ma

from .made import folder


class Settings(ma.AttentionConfig):
    """Attention's keys, and two sections."""

    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()


class Model(nnx.Module):
    """Attention over the rows of latents."""

    def __init__(self, settings: Settings, mesh: jax.sharding.Mesh | None, rngs: nnx.Rngs) -> None:
        how = {"config": settings, "mesh": mesh, "rngs": rngs}
        self.attn = ma.FlaxAttention(8, heads=2, dim_head=4, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attn(x.reshape(len(x), -1, 8)).reshape(x.shape)


class Mine(Task):
    """Train velocities on the latents of a folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def source(self) -> LatentFolder:
        return LatentFolder(self.settings.data.folder)

    def build(self, mesh, rngs):
        return Model(self.settings, mesh, rngs)

    def noised(self, batch, empty, key):
        for_times, for_noise = jax.random.split(key)
        t = flow.times(for_times, len(batch["latents"]), 1.0)
        return flow.noised(batch["latents"], t, for_noise)._asdict()

    def loss(self, model, examples):
        return jnp.mean((model(examples["mixed"]) - examples["velocity"]) ** 2)


def test_a_model_of_ones_own_trains_goes_on_and_is_exported(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", "flux", 8)
    training = {"batch_size": 8, "steps": 3, "checkpoint_every": 1, "warmup_steps": 0}
    training |= {"output_dir": str(tmp_path / "run"), "learning_rate": 1e-2}

    def trained(**changes):
        settings = Settings(data={"folder": data}, training=training | changes)
        return train(Mine(settings))

    model, losses = trained()
    assert len(losses) == 3 and isinstance(model, Model)
    _, more = trained(steps=4)
    assert more[:3] == losses, "the run went on"
    _, straight = trained(steps=4, output_dir=str(tmp_path / "other"))
    assert straight == more
    tensors = ma.weights.SafeTensors(tmp_path / "run" / "model")
    assert "attn.to_q.weight" in list(tensors)
