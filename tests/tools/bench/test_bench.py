"""The bench on a CPU, at small sizes: measurements, comparisons, output, plots and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import split
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from maxattn import masks as M
from maxattn.errors import ConfigError
from maxattn.target import Target
from maxattn.tools.bench import reports
from maxattn.tools.bench.kernels import bench, inputs_of
from maxattn.tools.bench.module import bench_module, elementwise_bytes
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD, BenchRow, as_table, to_json
from maxattn.tools.cli import main
from maxattn.tools.model_shapes import Shape, read
from maxattn.tools.writable import write_whole
from maxattn.tools.xla_options import xla_options

SMALL = Shape("small", 1, 64, 64, 2, 16, mask=M.Causal(), dtype="float32")
CPU = Target("cpu", "cpu")


# ---- kernels -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[BenchRow]:
    return bench(SMALL, ("dot_product", "auto", "cudnn"), budget=0.01)


def test_rows_have_times_or_reasons(rows: list[BenchRow]) -> None:
    measured = {(r.who, r.what) for r in rows if r.ms > 0 and r.tflops > 0 and r.peak > 0}
    passes = {"dot_product": (FORWARD, BACKWARD), "auto": (FORWARD, BOTH)}
    assert measured == {(who, what) for who, its in passes.items() for what in its}
    assert [row.note for row in rows if not row.ms] == ["it needs an NVIDIA GPU, and this is cpu"]
    errors = [row.error for row in rows if row.what == FORWARD and row.ms]
    assert all(error is not None and error < 1e-2 for error in errors), "against float32"


def test_the_rate_counts_allowed_pairs_alone(rows: list[BenchRow]) -> None:
    row, pairs = rows[0], 64 * 65 // 2
    assert row.tflops == pytest.approx(4 * 2 * 16 * pairs / (row.ms / 1e3) / 1e12)


def test_table_and_json(rows: list[BenchRow], capsys: pytest.CaptureFixture[str]) -> None:
    assert len(as_table(rows).splitlines()) == len(rows) + 1
    saved = json.loads(to_json(rows, Target.here()))
    assert saved["machine"]["device"] == "cpu" and len(saved["rows"]) == len(rows)
    assert capsys.readouterr().err == "", "the function itself prints nothing"


def test_inputs_have_all_digits_of_their_dtype() -> None:
    """They do not have only the 128 values of `jax.random.normal` in bfloat16."""
    (q, *_), *_ = inputs_of(read("1,4096,4096,2,16"), CPU)
    assert q.dtype == jnp.bfloat16 and len(np.unique(np.asarray(q, np.float32))) > 2000
    assert float(jnp.max(jnp.abs(q))) > 3.5


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Progress is printed on stderr during the run."""
    out = tmp_path / "new" / "b.json"
    words = ["bench", "--shape", "1,64,64,2,16", "--kernel", "dot_product", "--seconds", "0.01"]
    assert main([*words, "--json", str(out)]) == 0
    ran = capsys.readouterr()
    assert "dot_product" in ran.out and json.loads(out.read_text())["rows"]
    first, *lines = ran.err.splitlines()
    assert first.startswith("measuring 1,64,64,2,16 on cpu: no accelerator is here")
    assert [line.split(maxsplit=1)[1] for line in lines if "running" in line] == [
        "1/3  reference in float32", "2/3  dot_product, forward", "3/3  dot_product, backward",
    ]  # fmt: skip
    assert sum("compiling" in line for line in lines) == 3 and "timing 3" in lines[-1]
    assert main(["bench", "--shape", "1,64,64,2,16", "--kernel", "cudnn"]) == 1


# ---- meshes and modules --------------------------------------------------------------------------


def test_strategies_are_compared_with_the_same_kernel_on_one_device(tmp_path: Path) -> None:
    """A strategy that cannot run gives the reason: three heads do not divide over four devices."""
    out = tmp_path / "b.json"
    words = "--mesh context=4 --strategy ring --strategy ulysses --kernel dot_product --peers"
    shape = ["--shape", "1,128,128,3,16", "--seconds", "0.01", "--json", str(out)]
    assert main(["bench", *words.split(), *shape]) == 0
    rows = [BenchRow(**row) for row in json.loads(out.read_text())["rows"]]
    who = ["dot_product, 1 device"] * 2 + ["dot_product, each of 4"] * 2 + ["ring over 4"] * 2
    assert [(r.who, r.what) for r in rows[:6]] == list(zip(who, [FORWARD, BOTH] * 3, strict=True))
    for one, four in zip(rows[:2], rows[4:6], strict=True):
        assert four.efficiency == pytest.approx(one.ms / (4 * four.ms))
    assert all(r.efficiency is None and r.ms for r in rows[:4])
    assert all(r.error is not None and r.error < 2e-2 for r in rows[:6] if r.what == FORWARD)
    assert all("ulysses" in row.note and not row.ms for row in rows[6:8])
    assert [r.note for r in rows[8:]] == ["No module named 'transformer_engine'"] * 2


@pytest.mark.slow
def test_the_module_is_compared_with_its_parts() -> None:
    """Shared key heads are measured too."""
    shape = read("1,64,64,4,16,2")
    rows = bench_module(shape, "dot_product", budget=0.01)
    assert len(rows) == 8 and all(row.ms for row in rows), [row.note for row in rows]
    forward, both, *parts = rows
    moved = [elementwise_bytes(shape, training) for training in (False, True)]
    for row, i in ((forward, 0), (both, 1)):
        assert row.bound == pytest.approx(parts[i].ms + parts[2 + i].ms + 1.15e3 * moved[i] / 4e12)
    assert "ms/bound" in as_table(rows) and "efficiency" not in as_table(rows)


def test_the_bytes_of_the_elementwise_parts() -> None:
    """q, k and tables; in the backward dq, q and dq, likewise k, dv, dy; casts of kernels."""
    shape, array, tables = read("2,64,64,3,16"), 2 * 64 * 48 * 2, 2 * 2 * 64 * 8 * 4
    forward, both = (elementwise_bytes(shape, training, "bfloat16") for training in (False, True))
    assert (forward, both) == (4 * array + tables, 12 * array + 2 * tables)
    assert elementwise_bytes(shape, True) - both == 2 * 4 * 48 * 48 * 6


# ---- reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reports.REPORTS)
def test_reports(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of `bench` rows has a table with every time, and a plot."""
    pytest.importorskip("matplotlib")

    def row(shape: Shape, who: str, what: str) -> BenchRow:
        return BenchRow(shape.name, who, what, shape.q_len / 100 + len(who), 1.0, 3 << 20)

    def measured(shape: Shape, names: tuple[str, ...], *_: Any) -> list[BenchRow]:
        return [row(shape, who, what) for who in names for what in (FORWARD, BACKWARD)]

    def module(shape: Shape, kernel: str, **_: Any) -> list[BenchRow]:
        return [row(shape, kernel, what) for what in (FORWARD, BOTH)]

    monkeypatch.setattr(reports, "bench", measured)
    monkeypatch.setattr(reports, "bench_module", module)
    report = reports.make(name, CPU)
    whos = {"dot_product", "memory_efficient"}
    assert report.rows and whos <= {row.who for row in report.rows}
    shown = [row for row in report.rows if name != "implementations" or row.what == FORWARD]
    assert all(f"{row.ms:.2f}" in report.text and row.who in report.text for row in shown)
    reports.draw(report, "cpu", tmp_path / "pictures" / f"{name}.png")
    assert (tmp_path / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


# ---- refusals ------------------------------------------------------------------------------------

KERNELS = "it must be one of dot_product"
NO_FILE = "it must be a file, and this is a folder"
WITH = "it applies only with"
NO_FOLDER = "it must be a folder, and a file has that name"
REFUSED = [
    ("no-such-shape", "it must be B,T,S,N,H"),
    ("--kernel bogus", f"{KERNELS}, memory_efficient, flash"),
    ("--kernel dot_product --kernel flsh", "did you mean 'flash'?"),
    ("--mesh context=2 --kernel bogus", KERNELS),
    ("--seconds -1", "it must be a number of seconds"),
    ("--seconds nan", "it must be a number of seconds"),
    ("--json {here}/a_file/b.json", "nothing can be written"),
    ("--json {here}", NO_FILE),
    ("--report implementations --pictures {here}/a_file", NO_FOLDER),
    ("--mesh context=99", "it needs 99 devices"),
    ("--mesh context=2 --mesh context=4", "the axis context is named twice"),
    ("--mesh context=0", "N at least 1"),
    ("--mesh time=2", "and an axis of data, context, tensor"),
    ("--module --mesh context=2", "a whole module is measured on one device"),
    ("--module --option nonsense", "it must be NAME=VALUE"),
    ("--option xla_gpu_autotune_level=2", f"{WITH} --mesh or --module"),
    ("--strategy ring", f"{WITH} --mesh"),
    (
        "--strategy ring --mesh context=2 --report layers",
        f"{WITH} --mesh, without --report",
    ),
    ("--pictures out", f"{WITH} --report"),
]


@pytest.mark.parametrize(("words", "rule"), REFUSED)
def test_what_is_refused_before_anything_is_measured(
    words: str,
    rule: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = "maxattn.tools.bench.kernels.measure"
    monkeypatch.setattr(measured, lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "a_file").touch()
    assert main(["bench", "--shape", "1,64,64,2,16", *words.format(here=tmp_path).split()]) == 1
    ran = capsys.readouterr()
    assert ran.out == "" and rule in ran.err and "remedy" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_a_file_takes_its_name_when_it_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_whole(path, "one")
    monkeypatch.setattr(Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_whole(path, "two")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


# ---- --option ------------------------------------------------------------------------------------


def test_values_of_every_kind_reach_the_compiler() -> None:
    words = split(
        "xla_gpu_enable_triton_gemm=False --xla_gpu_autotune_level=2 "
        "xla_step_marker_location=-1 xla_gpu_autotune_gemm_rtol=1 xla_dump_hlo_as_text=true "
        "xla_gpu_override_gemm_autotuner=a=b"
    )
    assert xla_options(words) == {
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_autotune_level": "2",
        "xla_step_marker_location": "-1",
        "xla_gpu_autotune_gemm_rtol": "1",
        "xla_dump_hlo_as_text": True,
        "xla_gpu_override_gemm_autotuner": "a=b",
    }


def test_a_value_that_flags_spell_otherwise() -> None:
    """XLA_FLAGS and `jax.jit` spell it differently; the latter is what this compiler gets."""
    name = "xla_gpu_collective_permute_mode"
    for value in ("peer", "COLLECTIVES_PEER_MEMORY"):
        assert xla_options([f"{name}={value}"]) == {name: "COLLECTIVES_PEER_MEMORY"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("xla_none=1", "No such compile option"),
        ("xla_gpu_enable_triton_gemm=0", "switches as true or false"),
        ("xla_gpu_autotune_level=2.5", "not a valid int32"),
        ("=1", "NAME=VALUE"),
        ("xla_gpu_autotune_level", "NAME=VALUE"),
    ],
)
def test_what_the_compiler_refuses(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        xla_options([word], "training.compiler_options")
    assert str(error.value).startswith("training.compiler_options: ")


def test_options_of_our_configs_are_known_to_every_compiler() -> None:
    """A CPU reads options for GPUs too, so they must be harmless there."""
    found = 0
    for path in (Path(__file__).parents[3] / "configs").glob("*.yml"):
        said = yaml.safe_load(path.read_text())
        for section in ("training", "sampling"):
            found += len(
                xla_options(
                    (said.get(section) or {}).get("compiler_options", ()), f"{path.name}: {section}"
                )
            )
    assert found >= 10
