"""Several processes in one run: the batch rows that each loads, and losses equal to one process."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from maxattn_examples.common import hosts
from maxattn_examples.common.command import parser_of, read_settings
from maxattn_examples.digits.settings import Settings
from maxattn_examples.digits.task import ClipTask
from maxattn_examples.train.loop import Training

import maxattn as ma
from maxattn.errors import ConfigError
from tests.examples.conftest import train

from .made import losses
from .runs import arrays, config, finish_many

STEPS = 10


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    names = {f"ici_{axis}_parallelism": n for axis, n in ({"data": 1} | sizes).items()}
    return ma.AttentionConfig(**names).make_mesh()


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"data": 2, "context": 4}, {"context": 8}, {"data": 2, "fsdp": 4}]
)
def test_a_batch_lies_on_the_mesh_as_it_was(sizes: dict[str, int]):
    mesh, batch = mesh_of(**sizes), np.arange(48).reshape(16, 3)
    rows = hosts.rows_here(16, mesh)
    np.testing.assert_array_equal(rows, np.arange(16))  # one process holds every row
    placed = hosts.on_devices(batch[rows], rows, 16, mesh)
    np.testing.assert_array_equal(placed, batch)
    ways = sizes.get("data", 1) * sizes.get("fsdp", 1)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(16 // ways, 3)}


# ---- joining -------------------------------------------------------------------------------------


JOIN = ["--coordinator", "here:1", "--num-processes", "2", "--process-id"]
# The flags of a process, and words of the message.
FLAGS = [
    (["--process-id", "0"], ("--coordinator: not given", "--num-processes N")),
    (["--coordinator", "here:1", "--process-id", "0"], ("--num-processes: not given",)),
    ([JOIN[0], "here", *JOIN[2:], "0"], ("--coordinator: here", "HOST:PORT")),
    ([*JOIN, "2"], ("--process-id: 2", "0 and 1")),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_flags_of_processes_are_refused_where_one_is_missing_or_wrong(
    flags: list[str], words: tuple[str, ...], tmp_path: Path
):
    path = tmp_path / "config.yml"
    path.write_text("attention: auto\n")
    with pytest.raises(ConfigError) as error:
        read_settings(parser_of("").parse_intermixed_args([str(path), *flags]), Settings, {})
    assert all(word in str(error.value) for word in words), str(error.value)


# ---- two processes -------------------------------------------------------------------------------


def of_gloo(line: str) -> bool:
    """Check whether a line is output of Gloo, whose threads interleave their lines."""
    sentence = "Rank is connected to peer ranks. Expected number of connected peer ranks is :"
    return all(word in sentence for word in re.findall("[A-Za-z]+", line))


# The sequence over the four devices of a process, the batch over both processes.
SPREAD = ("ici_data_parallelism=1", "ici_fsdp_parallelism=2", "ici_context_parallelism=4")
# The demo's own warm-up: a large rate at once would blow up the last bits, in which sums over
# devices differ.
HOW = {"steps": STEPS, "checkpoint_every": 10, "warmup_steps": 50}


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path: Path):
    alone, two = (config(tmp_path / name, **HOW) for name in ("alone", "two"))
    # The one process is this one, which has eight devices as well.
    whole = Settings.from_yaml(alone, [*SPREAD])
    train(whole, whole.make_mesh())
    first, second = finish_many(two, *SPREAD, processes=2, devices=4)
    found, wanted = (losses(tmp_path / name / "run", STEPS) for name in ("two", "alone"))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert f"step {STEPS}/{STEPS}" in first
    assert "all_gather over 4" in first
    said = [line for line in second.splitlines() if "Gloo" not in line and not of_gloo(line)]
    assert not said, "only process 0 speaks"

    # What two processes with four devices each wrote is read here, bit for bit, onto another mesh.
    settings = Settings.from_yaml(two, ["ici_tensor_parallelism=2", "ici_fsdp_parallelism=4"])
    state = Training(ClipTask.of(settings), settings.make_mesh()).last()[1]
    # Lists may have become mappings.
    wrote = {n.replace("'", ""): x for n, x in arrays(tmp_path / "two", STEPS).items()}
    for name in ("trained", "average"):
        for path, array in jax.tree_util.tree_leaves_with_path({name: getattr(state, name)}):
            place = jax.tree_util.keystr(path).replace("'", "")
            np.testing.assert_array_equal(array, wrote[place])
    kernel = state.trained["blocks"]["ffn"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
