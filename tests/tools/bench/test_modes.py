"""Meshes, the whole module and the reports on a CPU, at small sizes: what they measure, compare and
draw.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxattn.target import Target
from maxattn.tools.bench import as_table, profile, reports
from maxattn.tools.bench.jobs import random_inputs
from maxattn.tools.bench.mesh import bench_mesh
from maxattn.tools.bench.module import bench_module, elementwise_bytes
from maxattn.tools.bench.plots import draw
from maxattn.tools.bench.profile import device_time
from maxattn.tools.bench.ring_on_fewer_devices import ring_jobs
from maxattn.tools.bench.row import BOTH, FORWARD, BenchJob
from maxattn.tools.bench.timing import TimedFunction, measure
from maxattn.tools.cli import main
from maxattn.tools.model_shapes import read
from tests.jaxprs import of_primitive
from tests.reference import attention64, error

CPU = Target("cpu", "cpu")


def test_strategies_stand_beside_the_same_kernel_on_one_device() -> None:
    rows = bench_mesh(
        read("1,128,128,4,16"), {"context": 4}, ["ring"], "dot_product", peers=True, budget=0.01
    )
    who = ["dot_product, 1 device"] * 2 + ["dot_product, each of 4"] * 2 + ["ring over 4"] * 2
    assert [(r.who, r.what) for r in rows[:6]] == list(zip(who, [FORWARD, BOTH] * 3, strict=True))
    for one, four in zip(rows[:2], rows[4:6], strict=True):
        assert four.efficiency == pytest.approx(one.ms / (4 * four.ms))
    assert all(r.efficiency is None and r.ms for r in rows[:4])
    assert all(r.error is not None and r.error < 2e-2 for r in rows[:6] if r.what == FORWARD)
    assert [r.note for r in rows[6:]] == ["No module named 'transformer_engine'"] * 2


def test_a_strategy_that_cannot_run_says_why() -> None:
    rows = bench_mesh(read("1,96,96,3,16"), {"context": 4}, ["ulysses"], "dot_product", budget=0.01)
    assert "ulysses" in rows[-1].note and not rows[-1].ms


def ring_on_two(shape: str, ring_size: int) -> list:
    whole = random_inputs(read(shape), CPU)[0]
    return [whole, *ring_jobs(read(shape), "dot_product", ring_size, 2, whole)]


def test_a_ring_on_fewer_devices_sends_what_the_whole_one_sends() -> None:
    """A ring of four: three hops of K and V forward, three backward and three of gradients, each a
    quarter of them.
    """
    _, forward, both, *no_transfer = ring_on_two("1,128,128,4,16", 4)
    for job, hops in ((forward, 3), (both, 9)):
        moved = sends(job)
        assert [eqn.outvars[0].aval.shape for eqn in moved] == [(2, 1, 32, 4, 16)] * hops
        assert {tuple(eqn.params["perm"]) for eqn in moved} == {((0, 1), (1, 0))}
    assert [len(sends(job)) for job in no_transfer] == [0, 0]


def sends(job: BenchJob) -> list:
    """List the permutes of a program."""
    return of_primitive(jax.make_jaxpr(job.f)(*job.make()[0]).jaxpr, "ppermute")


def test_a_ring_on_fewer_devices_does_the_work_of_one_rank() -> None:
    """With the blocks of all other ranks beside its own, the first device has the numbers of a
    whole ring's first.
    """
    whole, _, _, _, no_transfer = ring_on_two("1,128,128,4,16", 4)
    q, k, v, dout = whole
    want = attention64(
        *(np.asarray(x, np.float64) for x in (q, k, v)), dout=np.asarray(dout, np.float64)
    )
    out, dq, dk, dv = jax.jit(no_transfer.f)(*no_transfer.make()[0])
    assert out.shape == dk.shape == dv.shape == (1, 64, 4, 16)
    assert max(error(out[:, :32], want.out[:, :32]), error(dq[:, :32], want.dq[:, :32])) < 2e-2


def test_a_ring_on_fewer_devices_stands_beside_one_device_without_an_error() -> None:
    rows = bench_mesh(
        read("1,128,128,4,16"), {"context": 4}, (), "dot_product", budget=0.01, ring_on=2
    )
    whos = ["dot_product, 1 device", "dot_product, each of 2", "ring of 4 on 2 devices"]
    assert [r.who for r in rows[::2]] == [*whos, "ring of 4 on 2 devices, no transfer"]
    assert rows[5].efficiency == pytest.approx(rows[1].ms / (4 * rows[5].ms))
    assert [r.error is None for r in rows[::2]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("1,126,126,4,16 --mesh context=4 --ring-on 2", "126 tokens do not divide over 4 ranks"),
        ("swba-256x16 --mesh context=4 --ring-on 2", "where every query sees every key"),
        ("1,128,64,4,16 --mesh context=4 --ring-on 2", "where every query sees every key"),
        (
            "1,128,128,4,16 --mesh context=4 --ring-on 4",
            "two devices or more run a ring of more ranks",
        ),
        ("1,128,128,4,16 --mesh context=2 --mesh context=4", "the axis context is named twice"),
        ("1,128,128,4,16 --mesh context=0", "N at least 1"),
        ("1,128,128,4,16 --mesh time=2", "with an axis of data, context, tensor"),
        (
            "1,128,128,4,16 --mesh data=2 --ring-on 2",
            "two devices or more run a ring of more ranks",
        ),
        ("1,128,128,4,16 --ring-on 2", "it is read with --mesh"),
        ("1,128,128,4,16 --played-by 2", "--ring-on: 2"),
        ("1,128,128,4,16 --mesh context=4 --ring-on 2 --peers", "neither --peers nor --strategy"),
    ],
)
def test_what_cannot_be_spread_or_run_on_fewer_devices(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, *rest = words.split()
    named = [shape] if shape[0].isalpha() else ["--shape", shape]
    assert main(["bench", *named, *rest, "--kernel", "dot_product"]) == 1
    assert said in capsys.readouterr().err


def test_the_module_is_compared_with_its_parts() -> None:
    """Of shared key heads, which are measured too."""
    shape = read("1,64,64,4,16,2")
    rows = bench_module(shape, "dot_product", budget=0.01)
    assert len(rows) == 10 and all(row.ms for row in rows), [row.note for row in rows]
    forward, both, *parts = rows
    moved = [elementwise_bytes(shape, training) for training in (False, True)]
    for row, i in ((forward, 0), (both, 1)):
        assert row.bound == pytest.approx(parts[i].ms + parts[2 + i].ms + 1.15e3 * moved[i] / 4e12)
    assert "of it" in as_table(rows) and "efficiency" not in as_table(rows)


def test_the_bytes_of_the_elementwise_parts() -> None:
    """q and k in and out, tables; backward dq, q and dq, the same of k, dv and dy; casts of four
    kernels.
    """
    shape, array, tables = read("2,64,64,3,16"), 2 * 64 * 48 * 2, 2 * 2 * 64 * 8 * 4
    assert elementwise_bytes(shape, False, "bfloat16") == 4 * array + tables
    assert elementwise_bytes(shape, True, "bfloat16") == 12 * array + 2 * tables
    assert (
        elementwise_bytes(shape, True) - elementwise_bytes(shape, True, "bfloat16")
        == 2 * 4 * 48 * 48 * 6
    )


def test_the_profile_names_what_ran() -> None:
    import jax.numpy as jnp

    product, x = jax.jit(lambda x: x @ x), jnp.ones((64, 64))
    product(x)
    found = device_time(lambda: jax.block_until_ready(product(x)))
    assert 0 < max(k.ms for k in found.kernels) <= found.span
    (timed,) = measure(
        [TimedFunction(lambda x: x @ x, lambda: [(x,), (x + 1,)])], 0.01, profiled=True
    )
    assert timed.profile.kernels and all(k.ms > 0 for k in timed.profile.kernels)


def test_what_of_the_transfers_is_covered() -> None:
    spans = {"kernel": [(0, 4), (6, 8)], "ncclDevKernel_SendRecv": [(1, 2), (3, 5), (7, 9)]}
    events = [profile.Event(n, n, a * 1e6, b * 1e6) for n in spans for a, b in spans[n]]
    assert profile._overlap(events) == (9, 5, 2, 1)


@pytest.mark.parametrize("lines", [("Stream #13(Compute)", "Stream #17(MemcpyP2P)"), ("XLA Ops",)])
def test_of_a_gpu_and_of_a_tpu_the_first_device_s_kernels_are_read(lines: tuple[str, ...]) -> None:
    def plane(name: str, *lines: str) -> SimpleNamespace:
        event = SimpleNamespace(
            name="fusion",
            start_ns=1.0,
            duration_ns=2.0,
            stats=[("hlo_op", f"fusion.{name[-1]}"), ("hlo_module", "jit_step(7)")],
        )
        return SimpleNamespace(
            name=name, lines=[SimpleNamespace(name=line, events=[event]) for line in lines]
        )

    kind = "TPU" if "XLA Ops" in lines else "GPU"
    named = (f"/device:{kind}:1", f"/device:{kind}:0", "/device:CUSTOM:Megascale:0", "/host:CPU")
    record = SimpleNamespace(
        planes=[plane(name, *lines, "Steps", "Async XLA Ops") for name in named]
    )
    assert list(profile._events(record)) == [("fusion", "fusion.0", 1.0, 3.0, "jit_step")] * len(
        lines
    )


@pytest.mark.parametrize(
    "name",
    [
        n if n == "implementations" else pytest.param(n, marks=pytest.mark.slow)
        for n in reports.REPORTS
    ],
)
def test_reports(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    plain = {name: kernel for name, kernel in reports.KERNELS.items() if "flash" not in name}
    monkeypatch.setattr(
        reports, "KERNELS", plain
    )  # interpreted Pallas kernels take long to compile
    report = reports.make(name, CPU, budget=0.005)
    assert {row.who for row in report.rows} <= set(plain)
    assert all(row.ms > 0 and row.peak > 0 for row in report.rows)
    assert len(report.text.splitlines()) > 3
    draw(report, "cpu", tmp_path / "pictures" / f"{name}.png")
    assert (tmp_path / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, out = ["bench", "--shape", "1,64,64,2,16", "--seconds", "0.01"], tmp_path / "b.json"
    spread = ["--mesh", "context=2", "--strategy", "ring", "--kernel", "dot_product"]
    assert main([*shape, *spread, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["rows"][-1]["efficiency"] > 0
    assert main([*shape, "--mesh", "context=99"]) == main([*shape, "--mesh", "time=2"]) == 1
    assert main([*shape, "--module", "--option", "nonsense"]) == 1
    assert "it needs 99 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "read_with"),
    [
        ("--option xla_gpu_autotune_level=2", "--mesh or --module"),
        ("--profile", "--mesh or --module"),
        ("--strategy ring", "--mesh"),
        ("--strategy ring --mesh context=2 --report layers", "--mesh, without --report"),
        ("--pictures out", "--report"),
    ],
)
def test_nothing_is_given_that_is_not_read(
    words: str, read_with: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--shape", "1,64,64,2,16", *words.split()]) == 1
    said = capsys.readouterr().err
    assert words.split()[0] in said and f"it is read with {read_with}" in said
