"""Checkpoints of the examples with one file cut or changed: resumed as saved, or refused."""

from __future__ import annotations

from random import Random

import numpy as np

from tests.fuzz.case import Case, Machine, Names, Wrong

SOURCE = """\
import pathlib, random, shutil, sys, tempfile, types
sys.path.insert(0, 'examples')
from train.checkpoint import Checkpoints
from train.task import Fixed
class Settings:
    def resolved(self):
        return {{'model': {{'width': 4}}}}
folder = tempfile.mkdtemp()
training = types.SimpleNamespace(output_dir=folder, keep_checkpoints=2)
fixed = Fixed(('model',), ())
state = {{'w': jnp.arange(6.0).reshape(2, 3), 'n': jnp.ones(4)}}
with Checkpoints(Settings(), training, fixed) as saved:
    saved.save(state, {{'at': 3}}, [1.0, 2.0], {{}})
files = sorted(p for p in pathlib.Path(folder).rglob('*') if p.is_file())
path = files[{which} % len(files)]
data = path.read_bytes()
at = int({at} * len(data))
path.write_bytes({how})
with Checkpoints(Settings(), training, fixed) as opened:
    losses = opened.losses
    got = opened.load(state) if opened.step else state
"""
HOWS = ("data[:at]", "data[at:]", "b''", "data[:at] + bytes([255]) + data[at + 1:]", "data")


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw which file is damaged, where and how."""
    which, at, how = rng.randrange(1000), rng.random(), rng.choice(HOWS)
    source = SOURCE.format(which=which, at=at, how=how)
    return Case("checkpoints", seed, source, _check, facts={"how": how}, seconds=60)


def _check(names: Names) -> None:
    show = "print(path, losses, got)"
    if names["losses"] not in ([1.0, 2.0], []):
        raise Wrong(f"the losses are {names['losses']}", show)
    for name, value in names["state"].items():
        if not np.array_equal(np.asarray(names["got"][name]), np.asarray(value)):
            raise Wrong(f"{name} is not what was saved, in {names['path'].name}", show)
