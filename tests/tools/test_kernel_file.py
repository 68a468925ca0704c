"""`maxattn compile --kernel-file`: what it refuses, and the estimate of a kernel of others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from maxattn.config import AttentionConfig
from maxattn.errors import InputError
from maxattn.masks import Causal
from maxattn.tools.cli.compile import report
from maxattn.tools.compile.job import CompileJob, run_in_child, tpu_python
from maxattn.tools.compile.kernel_file import (
    check_kernel_job,
    program_of_file,
    read_kernel_file,
    traced,
)
from maxattn.tools.model_shapes import read
from tests.golden_text import check_golden

needs_libtpu = pytest.mark.skipif(
    tpu_python() is None, reason='libtpu is not installed (pip install "maxattn[tpu]")'
)
SHAPE = read("1,1024,1024,2,128")
FILE = """
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from beside import HEADS_FIRST

def attention(q, k, v, config):
    q, k, v = (x.transpose(HEADS_FIRST) for x in (q, k, v))
    return flash_attention(q, k, v).transpose(HEADS_FIRST)

def turned(q, k, v, config):
    return q.transpose(0, 2, 1, 3)

def broken(q, k, v, config):
    return q + config.flash_block_sizes.block_q_of_mine

SIZE = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("HEADS_FIRST = 0, 2, 1, 3\n")
    (tmp_path / "theirs.py").write_text(FILE)
    (tmp_path / "wrong.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "notes.txt").write_text("attention\n")
    return tmp_path


def job(text: str, **changes: Any) -> CompileJob:
    made = CompileJob("v6e:1x1", AttentionConfig(), SHAPE, kernel_file=text, estimate=True)
    return replace(made, **changes)


def test_what_is_no_function_of_a_file(path: Path) -> None:
    texts = ("kernel.py", f"{path}/theirs.py:", f"{path}/theirs.py:a b", "not_there.py:attention")
    said = []
    for text in texts:
        with pytest.raises(InputError) as refused:
            read_kernel_file(text)
        said.append(str(refused.value).replace(str(path), "."))
    check_golden("cli/compile/kernel_file_names", "\n".join(said))
    assert read_kernel_file(f"{path}/theirs.py:attention") == f"{path}/theirs.py:attention"


def test_what_a_file_does_not_hold(path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    names = "theirs.py:attentoin", "theirs.py:SIZE", "wrong.py:attention", "notes.txt:attention"
    said = []
    for name in (*names, "theirs.py:broken", "theirs.py:turned"):
        one = job(f"{path}/{name}")
        with pytest.raises(InputError) as refused:
            traced(one, program_of_file(one, mesh))
        said.append(str(refused.value))
    check_golden("cli/compile/kernel_file_refused", "\n".join(said))


def test_what_a_function_does_not_compute() -> None:
    said = []
    changes: tuple[dict[str, Any], ...] = {"module": True}, {"shape": replace(SHAPE, mask=Causal())}
    for change in changes:
        with pytest.raises(InputError) as refused:
            check_kernel_job(job("theirs.py:attention", **change))
        said.append(str(refused.value))
    check_golden("cli/compile/kernel_file_computes", "\n".join(said))


@needs_libtpu
def test_several_devices_are_refused(path: Path) -> None:
    config = AttentionConfig(ici_context_parallelism=4)
    many = job(f"{path}/theirs.py:attention", topology="v6e:2x2", config=config)
    check_golden("cli/compile/kernel_file_devices", run_in_child(many, 120).message)


@needs_libtpu
def test_the_estimate_of_a_kernel_of_somebody_else(path: Path) -> None:
    one = job(f"{path}/theirs.py:attention")
    outcome = run_in_child(one, 120)
    (kernel,) = outcome.estimate["kernels"]
    assert kernel["flops"] == 4 * 2 * 1024 * 1024 * 128
    text = report(one, outcome)
    assert text.startswith("1,1024,1024,2,128: theirs.py:attention, for v6e:1x1")
    assert re.search(r"kernel  \S+: [\d.e-]+ .*TFLOP/s, .* estimated by libtpu", text)


@needs_libtpu
def test_a_training_step_of_it_has_no_rate(path: Path) -> None:
    outcome = run_in_child(job(f"{path}/theirs.py:attention", training=True), 240)
    kernels = outcome.estimate["kernels"]
    assert len(kernels) > 1 and not any(kernel["flops"] for kernel in kernels)
