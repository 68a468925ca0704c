"""Adjusting makes every request legal, leaves legal ones unchanged, and never raises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maxattn.block_sizes import (
    DKV,
    DQ,
    FORWARD,
    BlockSizes,
    adjust,
    facts_of,
    log_lines,
)
from maxattn.block_sizes.sizes import Facts
from maxattn.block_sizes.vmem import fits
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from tests.block_sizes.asks import CPU, KEYS, TPUS
from tests.tries import tries

SIZES = st.one_of(
    st.none(),
    st.integers(1, 64).map(lambda n: n * 128),
    st.integers(1, 5000),
    st.sampled_from((1, 3024, 2048, 512, 10**9)),
)
LENGTHS = st.one_of(st.integers(1, 4000), st.sampled_from((77, 257, 1024, 32760, 75600, 183600)))
FUSED = st.sampled_from((None, False, True))


@st.composite
def requests(draw: st.DrawFn) -> tuple:
    """Draw (asked, call, kernel, target, training)."""
    asked = FlashBlockSizes(**{key: draw(SIZES) for key in KEYS}, use_fused_bwd_kernel=draw(FUSED))
    role = draw(st.sampled_from(("self", "cross")))
    q_len = draw(LENGTHS)
    kv_len = q_len if role == "self" else draw(LENGTHS)
    head_dim = draw(st.sampled_from((40, 64, 72, 80, 128, 160, 256)))
    dtype = draw(st.sampled_from(("float32", "bfloat16")))
    call = Call(1, q_len, kv_len, 2, 2, head_dim, dtype, role=role)
    target = draw(st.sampled_from((*TPUS, CPU)))
    kernel = draw(st.sampled_from(("flash", "tokamax_flash")))
    return asked, call, kernel, target, draw(st.booleans())


@tries(250)
@given(requests())
def test_every_request_becomes_legal_and_stays(request):
    asked, call, kernel, target, training = request
    sizes, changes = adjust(*request)
    facts = facts_of(call, kernel, target, training)
    assert all(change.reason and change.asked != change.used for change in changes)
    assert bool(log_lines(call.role, changes)) == bool(changes)
    assert adjust(sizes.asked(), call, kernel, target, training) == (sizes, ())
    # What was asked for and not reported as changed is what runs.
    changed = {change.key for change in changes}
    for key in (*FORWARD, *(KEYS if training else ())):
        if getattr(asked, key) is not None and key not in changed:
            assert getattr(sizes, key) == getattr(asked, key)
    obeys_the_rules_as_written_down_here(sizes, facts)


def obeys_the_rules_as_written_down_here(sizes: BlockSizes, facts: Facts) -> None:
    q_step = 128 if facts.training else 8
    for key in KEYS:
        size, step = getattr(sizes, key), 128 if key.startswith("block_kv") else q_step
        length = facts.kv_len if key.startswith("block_kv") else facts.q_len
        if size is not None:
            assert size > 0 and size % step == 0 and size < length + step
    assert sizes.block_kv % sizes.block_kv_compute == 0
    if not facts.training:
        assert sizes.part(DKV) is sizes.part(DQ) is sizes.use_fused_bwd_kernel is None
        return
    dkv = sizes.part(DKV)
    assert dkv is not None
    q, kv, compute = dkv
    assert (sizes.block_q % q, sizes.block_kv % kv, kv % compute) == (0, 0, 0)
    assert sizes.use_fused_bwd_kernel or facts.kernel != "tokamax_flash"
    if sizes.use_fused_bwd_kernel:
        assert q == sizes.block_q and (sizes.block_q_dq, sizes.block_kv_dq) == (None, None)
    else:
        assert sizes.block_q_dq is not None and sizes.block_kv_dq is not None
        assert (sizes.block_q % sizes.block_q_dq, sizes.block_kv % sizes.block_kv_dq) == (0, 0)
    if facts.chip is not None:
        assert fits("fused" if sizes.use_fused_bwd_kernel else "dkv", (q, kv, compute), facts)


@tries(150)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_a_legal_request_is_never_changed(q, kv, q_parts, kv_parts, fused):
    """The sizes divide as required, and are small enough for any chip."""
    whole_q, whole_kv = q * q_parts * 128, kv * kv_parts * 128
    backward_q = whole_q if fused else q * 128
    forward, dkv = (whole_q, whole_kv, kv * 128), (backward_q, whole_kv, kv * 128)
    dq = (None, None) if fused else (q * 128, kv * 128)
    sizes = dict(zip(KEYS, (*forward, *dkv, *dq), strict=True))
    asked = FlashBlockSizes(**sizes, use_fused_bwd_kernel=fused)
    call = Call(1, 75600, 75600, 2, 2, 128, "bfloat16")
    sizes, changes = adjust(asked, call, "flash", CPU, True)
    assert changes == ()
    assert sizes.asked() == asked
