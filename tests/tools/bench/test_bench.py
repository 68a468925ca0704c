"""The bench on a CPU: every row has a time or says why not."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks as M
from maxattn.target import Target
from maxattn.tools.bench import as_table, bench, timing, to_json
from maxattn.tools.bench.jobs import random_inputs
from maxattn.tools.bench.row import FORWARD, BenchRow
from maxattn.tools.cli import main
from maxattn.tools.model_shapes import Shape, read
from maxattn.tools.writable import write_whole

SMALL = Shape("small", 1, 64, 64, 2, 16, mask=M.Causal(), dtype="float32")


@pytest.fixture(scope="module")
def rows() -> list[BenchRow]:
    return bench(SMALL, ("dot_product", "auto", "cudnn"), budget=0.01)


def test_rows_have_times_or_reasons(rows: list[BenchRow]) -> None:
    measured = {
        (row.who, row.what) for row in rows if row.ms > 0 and row.tflops > 0 and row.peak > 0
    }
    assert measured == {
        ("dot_product", "forward"),
        ("dot_product", "backward"),
        ("auto", "forward"),
        ("auto", "forward+backward"),
    }
    assert [row.note for row in rows if not row.ms] == ["it needs an NVIDIA GPU, and this is cpu"]


def test_inputs_have_all_digits_of_their_dtype() -> None:
    """And not the 128 values of `jax.random.normal` in bfloat16."""
    (q, *_), *_ = random_inputs(read("1,4096,4096,2,16"), Target.named("cpu"))
    assert q.dtype == jnp.bfloat16 and len(np.unique(np.asarray(q, np.float32))) > 2000
    assert float(jnp.max(jnp.abs(q))) > 3.5


def test_turns_are_in_changing_order() -> None:
    """No job follows the same one in most rounds."""
    for n in range(3, 9):
        rounds = [timing.in_order(i, list(range(n))) for i in range(timing.BATCHES)]
        assert all(sorted(each) == list(range(n)) for each in rounds)
        assert max(Counter(pairwise(chain(*rounds))).values()) <= 3
    assert [timing.in_order(i, [0, 1])[0] for i in range(4)] == [0, 1, 1, 0]


def test_few_calls_are_queued_on_several_devices() -> None:
    """Of some fifty programs with collectives XLA's CPU finishes none, and it ends the process."""
    assert timing._calls(timing.Timed(seconds=1e-6), 1.0) == (timing.BATCHES, timing.ON_SEVERAL)


def test_errors_are_against_float32(rows: list[BenchRow]) -> None:
    errors = [row.error for row in rows if row.what == FORWARD and row.ms]
    assert all(error is not None and error < 1e-2 for error in errors)


def test_the_rate_counts_allowed_pairs_alone(rows: list[BenchRow]) -> None:
    row = rows[0]
    pairs = 64 * 65 // 2
    assert row.tflops == pytest.approx(4 * 2 * 16 * pairs / (row.ms / 1e3) / 1e12)


def test_report(rows: list[BenchRow]) -> None:
    assert len(as_table(rows).splitlines()) == len(rows) + 1
    saved = json.loads(to_json(rows, Target.here()))
    assert saved["machine"]["device"] == "cpu" and len(saved["rows"]) == len(rows)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "b.json"
    words = ["bench", "--shape", "1,64,64,2,16", "--kernel", "dot_product", "--seconds", "0.01"]
    words += ["--json", str(out)]
    assert main(words) == 0
    assert "dot_product" in capsys.readouterr().out and json.loads(out.read_text())["rows"]
    assert main(["bench", "no-such-shape"]) == 1


def test_progress_is_told_as_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--shape", "1,64,64,2,16", "--kernel", "dot_product", "--seconds", "0.01"]
    assert main(words) == 0
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith("measuring 1,64,64,2,16 on cpu: no accelerator is here")
    assert [line.split(maxsplit=1)[1] for line in lines if "running" in line] == [
        "1/3  reference in float32", "2/3  dot_product, forward", "3/3  dot_product, backward",
    ]  # fmt: skip
    assert sum("compiling" in line for line in lines) == 3 and "timing 3" in lines[-1]
    bench(SMALL, ("dot_product",), budget=0.01)
    assert capsys.readouterr().err == "", "the function itself prints nothing"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kernel bogus", "the kernels are dot_product, memory_efficient, flash"),
        ("--kernel dot_product --kernel flsh", "did you mean 'flash'?"),
        ("--mesh context=2 --kernel bogus", "the kernels are dot_product"),
        ("--seconds -1", "a measurement takes some time"),
        ("--seconds nan", "a measurement takes some time"),
        ("--json {here}/a_file/b.json", "nothing can be written"),
        ("--json {here}", "it is a file, and this is a folder"),
        (
            "--report implementations --pictures {here}/a_file",
            "it is a folder, and there is a file of that name",
        ),
    ],
)
def test_what_is_refused_before_anything_is_measured(
    words: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "maxattn.tools.bench.timing.measure", lambda *_, **__: pytest.fail("measured")
    )
    (tmp_path / "a_file").touch()
    assert main(["bench", "--shape", "1,64,64,2,16", *words.format(here=tmp_path).split()]) == 1
    ran = capsys.readouterr()
    assert ran.out == "" and said in ran.err and "remedy" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_a_file_takes_its_name_when_it_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_whole(path, "one")
    monkeypatch.setattr(Path, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_whole(path, "two")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]
