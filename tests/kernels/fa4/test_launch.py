"""How problems are launched: one golden file; plans and kernels use the same `Launch`."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4.kernel import HopperFa4
from maxattn.kernels.fa4.launch import backward_launch, forward_launch
from maxattn.kernels.fa4.problem import of_call, of_inputs
from maxattn.kernels.fa4.tiles import Tile, fits, forward_tiles, forward_time
from maxattn.kernels.fa4.work import end_of
from tests.golden_text import check_golden

ROOT = Path(__file__).parents[3]
H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),), capability="9.0")
LENGTHS = M.KeyPadding(np.array([60, 512]))
IDS = np.zeros((8, 4096), np.int32)
# B, T, S, N, K, H and the mask, by name.
PROBLEMS: dict[str, tuple[Any, ...]] = {
    "Wan 1.3B 480p": (1, 32760, 32760, 12, 12, 128),
    "Wan 14B 720p": (1, 75600, 75600, 40, 40, 128),
    "Wan cross": (1, 32760, 512, 12, 12, 128),
    "Wan cross, lengths": (2, 32760, 512, 12, 12, 128, LENGTHS),
    "Flux": (2, 4608, 4608, 24, 24, 128),
    "SDXL 64": (2, 4096, 4096, 10, 10, 64),
    "SDXL cross": (2, 4096, 77, 10, 10, 64),
    "SD 1.5, 160": (2, 256, 256, 8, 8, 160),
    "beside a cache": (1, 1560, 32760, 12, 12, 128),
    "causal beside a cache": (1, 4680, 32760, 12, 12, 128, M.Causal()),
    "causal 2k": (1, 2048, 2048, 40, 40, 128, M.Causal()),
    "causal 8k": (8, 8192, 8192, 16, 16, 128, M.Causal()),
    "causal 75k": (1, 75600, 75600, 40, 40, 128, M.Causal()),
    "shared heads": (2, 8192, 8192, 32, 8, 128),
    "block window": (1, 32760, 32760, 12, 12, 128, M.BlockSlidingWindow(1560, 7)),
    "three intervals": (1, 4096, 4096, 8, 8, 64, M.LocalWindow(9, 9) | M.KeyLimit(99)),
    "segments": (8, 4096, 4096, 16, 16, 128, M.Segments(IDS, IDS)),
    "head dim 256": (2, 1024, 1024, 8, 8, 256),
}


def call_of(name: str) -> ma.Call:
    *sizes, mask = (*PROBLEMS[name], M.Full())[:7]
    return ma.Call(*sizes, "bfloat16", mask.bind(*sizes[1:3]))


def test_launches_are_as_they_were() -> None:
    lines = []
    for name in PROBLEMS:
        for sms in (132, 114, 78):
            problem = of_call(call_of(name), sms)
            for launch in (forward_launch(problem), backward_launch(problem)):
                ends = f"group {launch.group}, {launch.microseconds / 1e3:.3g} ms"
                lines.append(f"{name}, {sms} SMs: {launch.line}; {ends}")
    check_golden("kernels/fa4_launches", "\n".join(lines) + "\n")


def draw(rng: random.Random) -> tuple[ma.Call, M.Mask]:
    t, s = (int(10 ** rng.uniform(1.2, most)) for most in (4.0, 4.5))
    offset, kv_heads, batch = rng.randint(-t, s), rng.choice((1, 2, 4)), rng.choice((1, 2, 3))
    ids = M.Segments(*(np.zeros((batch, n), np.int32) for n in (t, s)))
    flags = M.KeyPadding(np.ones((batch, s), bool))
    causal, lengths = M.Causal(offset=offset), M.KeyPadding(np.full(batch, s // 2 + 1))
    window = M.LocalWindow(rng.randint(0, t), 9, offset=offset)
    masks = M.Full(), ids, flags, causal, causal & ids, window & flags, lengths
    mask = rng.choice(masks).bind(t, s)
    heads, head_dim = kv_heads * rng.choice((1, 4)), rng.choice((40, 64, 72, 96, 128, 160, 256))
    return ma.Call(batch, t, s, heads, kv_heads, head_dim, "bfloat16", mask), mask


def test_a_plan_and_what_runs_have_one_problem() -> None:
    rng = random.Random(1)
    for _ in range(200):
        call, mask = draw(rng)
        sizes = (call.q_len, call.heads), (call.kv_len, call.kv_heads)
        q, k = (
            jax.ShapeDtypeStruct((call.batch, *size, call.head_dim), "bfloat16") for size in sizes
        )
        assert of_call(call, 132) == of_inputs(Inputs(q, k, k, mask=mask), 132)  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "sms"), [("NVIDIA H20", 78), ("NVIDIA H100 PCIe", 114), ("NVIDIA H200", 132)]
)
def test_the_plan_counts_the_sms_of_its_target(kind: str, sms: int) -> None:
    target = ma.Target.named(kind, H200.packages)
    call, config = call_of("Wan cross"), ma.AttentionConfig(attention="flash")
    line = backward_launch(of_call(call, sms)).line
    assert line in ma.plan(call, config, None, target).explain()
    assert HopperFa4.build(call, config, target).sms == target.device.sms == sms


@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("listed", [False, True])
def test_tiles_fit_shared_memory(head_dim: int, listed: bool) -> None:
    for lengths in ((60, 77), (500, 300), (9000, 9000), (4680, 40000)):
        for tile in forward_tiles(head_dim, *lengths, listed):
            assert fits(head_dim, tile) and tile.keys % 16 == 0


def test_the_tile_with_the_smallest_estimate_was_measured_to_be_fast() -> None:
    """The measurements are those from which the constants of tiles.py come, without a mask."""
    rows = json.loads((ROOT / "docs/measured/h200-forward-tiles-2026-11-25.json").read_text())
    lost = []
    for row in rows["rows"]:
        *sizes, head_dim = row["call"][0]
        problem = of_call(ma.Call(*sizes, head_dim, "bfloat16"), 132)
        found = []
        for name, ms in row.get("forward", {}).items():
            if row["call"][2] == "full" and (at := re.fullmatch(r"(\d+)x(\d+)( \w+)?", name)):
                tile = Tile(int(at[1]), int(at[2]))
                time = forward_time(head_dim, tile, queue=bool(at[3]))
                steps = time.start + problem.steps(tile, "queries") * time.step
                found.append((end_of(steps, problem.lanes, 132), ms))
        if len(found) > 1 and "device" not in row:
            lost.append(min(found)[1] / min(ms for _, ms in found))
    assert len(lost) == 128 and np.mean(lost) < 1.01 and max(lost) < 1.23


def test_a_window_that_hides_nothing_is_dense() -> None:
    mask = M.LocalWindow(2000, 2000).bind(900, 900)
    assert of_call(ma.Call(1, 900, 900, 4, 4, 64, "bfloat16", mask), 132).kind == "dense"
