"""A ring compiled for TPUs that are not there: every hop's transfer has a kernel between its start and its end."""

from __future__ import annotations

import pytest

import maxattn as ma
from maxattn.compile_job import Job, run_in_child, tpu_python
from maxattn.masks import Causal, Full, Mask
from maxattn.shapes import Shape


@pytest.mark.slow
@pytest.mark.skipif(tpu_python() is None, reason="libtpu is not installed, and MAXATTN_TPU_PYTHON names no python")
@pytest.mark.parametrize(("topology", "n"), [("v5p:2x2x1", 4), ("v6e:2x4", 8)])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_hops_run_beside_kernels(topology: str, n: int, mask: Mask, training: bool) -> None:
    config = ma.AttentionConfig(attention="ring", attention_kernel="flash", ici_context_parallelism=n)
    shape = Shape("", 1, 8192 * n, 8192 * n, 4, 128, mask=mask)
    outcome = run_in_child(Job(topology, config, shape, training), 900)
    assert outcome.ending == "compiled", outcome.message
    # K and V: n-1 hops of each; backward again, and n of their gradients, of which the last one home has nothing left
    # to run beside. Zig-zag has two runs of each.
    runs = 2 if "zig-zag x" in outcome.plan else 1
    assert runs == (1 if mask.is_full else 2)
    beside = [t for t in outcome.found if t["kind"] == "ppermute" and t["kernels"]]
    if mask.is_full:
        # The first hop of the backward can be the forward's: K and V are then kept.
        forward, backward = 2 * (n - 1), 4 * (n - 1) if training else 0
        assert forward + backward - (2 if training else 0) <= len(beside) <= forward + backward
    else:
        # Of operands this small the compiler sends the first hop along with those that are dealt out, before a kernel.
        assert len(beside) >= 2 * runs * (n - 2) * (3 if training else 1)
