"""A ring compiled for TPUs that are not there: every hop's transfer has a kernel between its start
and its end.
"""

from __future__ import annotations

import pytest

import maxattn as ma
from maxattn.masks import Causal, Full, Mask
from maxattn.tools.compile.job import CompileJob, run_in_child, tpu_python
from maxattn.tools.model_shapes import Shape


@pytest.mark.slow
@pytest.mark.skipif(
    tpu_python() is None, reason="libtpu is not installed, and MAXATTN_TPU_PYTHON names no python"
)
@pytest.mark.parametrize(("topology", "n"), [("v5p:2x2x1", 4), ("v6e:2x4", 8)])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_hops_run_beside_kernels(topology: str, n: int, mask: Mask, training: bool) -> None:
    config = ma.AttentionConfig(
        attention="ring", attention_kernel="flash", ici_context_parallelism=n
    )
    shape = Shape("", 1, 8192 * n, 8192 * n, 4, 128, mask=mask)
    outcome = run_in_child(CompileJob(topology, config, shape, training), 900)
    assert outcome.ending == "compiled", outcome.message
    # K and V: n-1 hops of each; backward again, and n of their gradients, the last one beside half
    # of the local keys. Zig-zag has two chunks of each.
    chunks = 2 if "zig-zag x" in outcome.plan else 1
    assert chunks == (1 if mask.is_full else 2)
    sent = [t for t in outcome.found if t["kind"] == "ppermute"]
    beside = [t for t in sent if t["kernels"]]
    if mask.is_full:
        # The first hop of the backward can be the forward's: K and V are then kept.
        forward, backward = 2 * (n - 1), 2 * (n - 1) + 2 * n if training else 0
        assert forward + backward - (2 if training else 0) <= len(sent) <= forward + backward
        assert len(beside) == len(sent)
    else:
        # Of operands this small the compiler sends the first hop along with those that are dealt
        # out, before a kernel.
        assert len(beside) >= 2 * chunks * ((n - 2) * 3 + 2 if training else n - 2)
