"""XLA's program of Wan 14B for eight absent H200s: its transfers, and what overlaps with them.

Each transfer is in the plan of an attention, or moves a parameter, its gradient or the model's
inputs and outputs. Needs jax's CUDA plugin, and no GPU. Compiling is not a measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.gpu.test_programs_compile import printed, pytestmark  # noqa: F401  (skips)

LAYERS, MIB = 40, 2**20
TIME_PROJECTION = 6 * 5120 * 5120 * 4  # bytes of the largest parameter of one layer, in float32
# All parameters learn in float32 where that fits the GPUs; elsewhere LoRA does, as in the config.
FULL = ("lora_rank=0", "param_dtype=float32", "sampling.height=480", "sampling.width=832")
# Pass, sizes of data, fsdp and context, strategy.
CASES = [
    ("train", 1, 8, 1, "none"),
    *(("train", 1, 4, 2, name) for name in ("ring", "ulysses")),
    *(("train", 1, 2, 4, name) for name in ("ring", "ulysses")),
    *(("train", 1, 1, 8, name) for name in ("ring", "ulysses_ring")),
    *(("sample", 1, 1, 8, name) for name in ("ring", "ulysses")),
    ("sample", 2, 1, 4, "ring"),
]
# What is moved outside of attention, over the axes of batch and sequence alone.
OUTSIDE = {
    "all_gather": "a parameter before it is used (FSDP), or tokens where they become frames",
    "psum_scatter": "a gradient's sum, to the device that owns it (FSDP)",
    "psum": "a gradient's sum, or the loss's",
    "ppermute": "a shard of a small parameter or its gradient, to the device that owns it",
    "all_to_all": "a shard of a small parameter or its gradient, to the device that owns it",
}


@cache
def compiled(kind: str, data: int, fsdp: int, context: int, strategy: str) -> dict[str, Any]:
    words = {"data": data, "fsdp": fsdp, "context": context}
    said = [f"ici_{axis}_parallelism={n}" for axis, n in words.items()]
    said += [f"training.batch_size={data * fsdp}"]
    said += [f"context_parallel={strategy}"] if context > 1 else []
    said += ["ulysses_shards=2"] if strategy == "ulysses_ring" else []
    said += FULL if fsdp >= 4 else ()
    return printed("meshes_child", kind, *said)


def of_attention(transfer: dict[str, Any]) -> bool:
    """Check whether a transfer is inside attention; psums may merge with those of gradients."""
    return "shard_map" in transfer["op_name"] and transfer["kind"] != "psum"


def moved(found: dict[str, Any], inside: bool) -> Iterator[dict[str, Any]]:
    return (t for t in found["transfers"] if of_attention(t) is inside)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_transfer_is_named(case: tuple[Any, ...]) -> None:
    found, train = compiled(*case), case[0] == "train"
    for t in moved(found, inside=False):
        assert t["kind"] in OUTSIDE and set(t["axes"]) <= {"data", "fsdp", "context"}, t
        assert t["bytes"] <= TIME_PROJECTION, t
    named, forward = Counter[Any](), Counter[Any]()
    for c in found["plans"]:
        if c["kind"] != "psum" and (train or c["when"] == "forward"):
            times = LAYERS * c["hops"] * c["arrays"]
            named[c["kind"], *c["axes"]] += times
            forward[c["kind"], *c["axes"]] += times if c["when"] == "forward" else 0
    seen = Counter[Any]()
    for t in moved(found, inside=True):
        seen[t["kind"], *t["axes"]] += t["times"]
    assert set(seen) == set(named)
    # The backward pass runs the forward again, and may keep what that received.
    more = forward if train else Counter[Any]()
    assert all(named[key] // 2 <= seen[key] <= named[key] + more[key] for key in named)


@pytest.mark.parametrize("case", [c for c in CASES if c[-1] == "ring"], ids=str)
def test_kernels_or_products_run_beside_each_hop_of_a_ring(case: tuple[Any, ...]) -> None:
    hops = list(moved(compiled(*case), inside=True))
    assert hops and all(t["kernels"] for t in hops)


@pytest.mark.parametrize("case", [c for c in CASES if c[-1] == "ulysses"], ids=str)
def test_products_run_beside_a_part_of_the_exchanges_of_heads(case: tuple[Any, ...]) -> None:
    """Nothing independent can overlap with the exchanges of v and of the output."""
    found = list(moved(compiled(*case), inside=True))
    assert sent(t for t in found if t["kernels"]) >= sent(found) / 4


@pytest.mark.parametrize("case", [c for c in CASES if c[2] > 1], ids=str)
def test_products_run_beside_most_of_what_fsdp_moves(case: tuple[Any, ...]) -> None:
    found = [t for t in moved(compiled(*case), inside=False) if t["axes"] == ["fsdp"]]
    assert sent(t for t in found if t["kernels"]) >= sent(found) / 2 and sent(found) > 1000 * MIB


def sent(found: Iterable[dict[str, Any]]) -> int:
    """Count the bytes of transfers over all their executions."""
    return sum(t["bytes"] * t["times"] for t in found)
