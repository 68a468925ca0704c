"""Values whose head dim differs from the keys': against float64, on one device and on meshes.

Also kernels that pad both head dims to one, and the modules.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn._attention import run
from maxattn.context_parallel.ring.gpu import GpuSchedule
from maxattn.context_parallel.ring.ring import Ring
from maxattn.errors import InputError, Unsupported
from maxattn.kernels.table import TABLE
from maxattn.tools.memory import estimate
from tests.cases import HEADS, KINDS, LENGTHS, TOLERANCE, XLA_KERNELS, allowed, both, compare
from tests.cases import arrays as same_dims
from tests.context_parallel.test_zigzag import free_permutes as free_permutes
from tests.golden_text import check_golden
from tests.pairwise import name_of, pairwise, plainly
from tests.reference import attention64, error
from tests.waiting import but, few

DIMS = [(8, 4), (4, 12)]  # (H, V)
ONE_DEVICE = {
    "kernel": list(XLA_KERNELS),
    "mask": list(KINDS),
    "length": ["odd", "cross"],
    "heads": ["mha", "gqa"],
    "bias": ["none", "full"],
    "dtype": ["float32", "bfloat16"],
    "dims": DIMS,
    "fold": [True, False],
}
ON_MESH = {
    "strategy": ["ring", "ring of GPUs", "ulysses", "ulysses_ring", "all_gather"],
    "kernel": list(XLA_KERNELS),
    "mask": ["full", "causal", "segments"],
    "dims": DIMS,
}
# Kernels of one head dim, which zeros fill.
NAMES = ("flash", "tokamax_flash", "tpu_flash")
PADDED = {name: ma.AttentionConfig(attention=name) for name in NAMES}
PADDED_ONE_DEVICE = {
    "kernel": list(PADDED),
    "mask": ["full", "causal", "lengths", "segments"],
    "dims": DIMS,
    "heads": ["mha", "gqa"],
    "dtype": ["float32", "bfloat16"],
    "length": ["odd"],
    "bias": ["none"],
    "fold": [True],
}
PADDED_ON_MESH = {
    "strategy": ["ring", "ring of GPUs", "ulysses"],
    "kernel": ["flash", "tpu_flash"],
    "mask": ["full", "causal"],
    "dims": DIMS,
}


def arrays(case: dict) -> dict[str, Any]:
    """Make the operands of a case; values and dout have V channels."""
    (t, s), (n, k), (h, v) = LENGTHS[case["length"]], HEADS[case["heads"]], case["dims"]
    x, rng = same_dims(case | {"head_dim": h, "batch": 2}), np.random.default_rng(11)
    dtype = jnp.dtype(case["dtype"])
    x["v"] = rng.normal(size=(2, s, k, v)).astype(dtype)
    x["dout"] = rng.normal(size=(2, t, n, v)).astype(dtype)
    ok = allowed(x["mask"], t, s)
    seen = np.ones((1, 1, t), bool) if ok is None else ok.any(-1)
    return x | {"ok": ok, "dlse": np.where(seen, x["dlse"], np.float32(0))}


def judge(case: dict, x: dict[str, Any], got: tuple[Any, ...]) -> None:
    given = x["q"], x["k"], x["v"], x["ok"], x["bias"]
    want = attention64(*given, dout=x["dout"], dlse=x["dlse"])
    compare(got, want, TOLERANCE[case["dtype"]])


# Masks, lengths and biases have no channels; a kernel sees padded heads as any others.
@pytest.mark.parametrize(
    "case",
    [
        *few(pairwise(ONE_DEVICE, lambda case: True), ("kernel", "dims")),
        *few(pairwise(PADDED_ONE_DEVICE, lambda case: True)),
    ],
    ids=name_of,
)
def test_against_float64(case: dict) -> None:
    x = arrays(case)
    config = (XLA_KERNELS | PADDED)[case["kernel"]].replace(split_head_dim=case["fold"])
    call = partial(ma.attention, mask=x["mask"], config=config, return_lse=True)
    f = jax.jit(partial(both, lambda q, k, v, bias: call(q, k, v, bias=bias), x))
    judge(case, x, f(x["q"], x["k"], x["v"], x["bias"]))


def cut_by_a_ring(case: dict) -> bool:
    """Check whether shards change the mask: rings cut it, other strategies see global positions."""
    return "ring" in case["strategy"] or case["mask"] == "segments"


def quick(case: dict) -> bool:
    """Keep one ring, and the strategies that exchange heads, because hops change no channel."""
    return (case["strategy"], case["kernel"]) == ("ring", "dense") or case["strategy"] == "ulysses"


# Chunks compile twice as long as dense.
FEW = pairwise(ON_MESH, cut_by_a_ring, core=("strategy",))
FEW = plainly(FEW, "kernel", "dense", cut_by_a_ring, ("strategy",))
FEW += pairwise(PADDED_ON_MESH, lambda case: True)


@pytest.mark.parametrize("case", but(FEW, quick), ids=name_of)
@pytest.mark.usefixtures("free_permutes")
def test_on_a_mesh_against_float64(case: dict) -> None:
    """Causal masks use zig-zag order here, since permutes cost nothing."""
    case = case | {"length": "64", "heads": "mha", "bias": "none", "dtype": "float32"}
    x, on_gpus = arrays(case), case["strategy"] == "ring of GPUs"
    config = (XLA_KERNELS | PADDED)[case["kernel"]].replace(
        context_parallel="ring" if on_gpus else case["strategy"],
        ici_data_parallelism=1, ici_context_parallelism=4,
        **({"ulysses_shards": 2} if case["strategy"] == "ulysses_ring" else {}),
    )  # fmt: skip
    mesh = config.make_mesh(jax.devices()[:4])
    mask = (ma.masks.Full() if x["mask"] is None else x["mask"]).bind(64, 64, 2, 4)
    call = ma.Call.of(x["q"], x["k"], mask, return_lse=True, value_head_dim=case["dims"][1])
    plan = ma.plan(call, config, mesh)
    assert not plan.fell_back
    if "ring" in case["strategy"] and case["mask"] == "causal":
        assert "zig-zag" in plan.strategy.label()
    if on_gpus:
        assert isinstance(plan.strategy, Ring)
        plan = replace(plan, strategy=replace(plan.strategy, schedule=GpuSchedule()))
    f = partial(both, lambda q, k, v: run(plan, q, k, v, None, mask, mesh), x)
    operands = x["q"], x["k"], x["v"]
    judge(case, x, jax.jit(f)(*operands))


# ---- modules -------------------------------------------------------------------------------------


def test_self_attention_with_heads_of_values_of_their_own() -> None:
    """The module equals its formula; gates per channel have V channels too."""
    config = ma.AttentionConfig(attention="dot_product")
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim_head": 8, "dim_head_v": 6}
    layer = ma.FlaxAttention(16, **sizes, gate="per_channel", config=config, rngs=nnx.Rngs(0))
    widths = {n: getattr(layer, n).kernel.shape for n in ("to_q", "to_k", "to_v", "to_out")}
    assert widths == {"to_q": (16, 32), "to_k": (16, 16), "to_v": (16, 12), "to_out": (24, 16)}
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    q, k, v = (getattr(layer, n)(x) for n in ("to_q", "to_k", "to_v"))
    heads = (q.reshape(2, 5, 4, 8), k.reshape(2, 5, 2, 8), v.reshape(2, 5, 2, 6))
    want = attention64(*heads).out.reshape(2, 5, 24)
    want = layer.to_out(want * jax.nn.sigmoid(layer.to_gate(x)))
    assert error(layer(x), want) < 2e-5


MESH: dict[str, int] = {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 4}


def test_cross_attention_with_an_image() -> None:
    """Precomputed keys and values give the same output as states, on a mesh too."""
    sizes: dict[str, Any] = {"heads": 4, "dim_head": 8, "dim_head_v": 12, "added_kv_proj_dim": 7}
    mesh = ma.AttentionConfig(**MESH).make_mesh()
    one, many = (ma.CrossAttention(16, 10, **sizes, mesh=m, rngs=nnx.Rngs(0)) for m in (None, mesh))
    x, text, image = jnp.ones((2, 8, 16)), jnp.ones((2, 3, 10)), jnp.ones((2, 5, 7))
    kv = one.compute_kv(text, image)
    assert kv.v.shape == (2, 3, 4, 12) and kv.image_v is not None
    want = one(x, text, encoder_hidden_states_image=image)
    np.testing.assert_allclose(one(x, kv=kv), want, rtol=1e-6)
    np.testing.assert_allclose(many(x, text, encoder_hidden_states_image=image), want, atol=1e-5)


@pytest.mark.slow
def test_joint_attention() -> None:
    """Text and picture have values with V channels; both outputs equal the formula."""
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim_head": 8, "dim_head_v": 6}
    config = ma.AttentionConfig(attention="dot_product")
    layer = ma.JointAttention(16, 12, **sizes, config=config, rngs=nnx.Rngs(0))
    assert layer.add_v_proj.kernel.shape == (12, 12) and layer.to_add_out.kernel.shape == (24, 12)
    x, text = (jax.random.normal(jax.random.key(i), (2, 5 - i, 16 - 4 * i)) for i in range(2))
    joint = []
    for name, heads, dim in (("q", 4, 8), ("k", 2, 8), ("v", 2, 6)):
        both = getattr(layer, f"add_{name}_proj")(text), getattr(layer, f"to_{name}")(x)
        joint.append(jnp.concatenate(both, axis=1).reshape(2, 9, heads, dim))
    want = attention64(*joint).out.reshape(2, 9, 24)
    picture, words = layer(x, text)
    assert error(picture, layer.to_out(want[:, 4:])) < 2e-5
    assert error(words, layer.to_add_out(want[:, :4])) < 2e-5
    mesh = ma.AttentionConfig(**MESH).make_mesh()
    many = ma.JointAttention(16, 12, **sizes, config=config, mesh=mesh, rngs=nnx.Rngs(0))
    for one, other in zip(many(x, text), (picture, words), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_weights_have_diffusers_names_and_a_cache_is_refused() -> None:
    layer = ma.FlaxAttention(16, heads=2, dim_head=8, dim_head_v=4, rngs=nnx.Rngs(0))
    sizes: dict[str, Any] = {"layers": 1, "batch": 1, "kv_heads": 2, "dim_head": 8}
    cache = ma.KVCache.empty(STREAM, **sizes, dtype="float32")
    with pytest.raises(InputError, match="dim_head_v: 4"):
        layer(jnp.ones((1, 12, 16)), cache=cache.layer(0))
    held = ma.weights.to_diffusers(layer)
    assert held["to_v.weight"].shape == (8, 16) and held["to_out.0.weight"].shape == (16, 8)
    fused = np.concatenate([held.pop(f"to_{x}.weight") for x in "qkv"])
    other = ma.FlaxAttention(16, heads=2, dim_head=8, dim_head_v=4, rngs=nnx.Rngs(1))
    ma.weights.load_diffusers(other, held | {"to_qkv.weight": fused})
    np.testing.assert_array_equal(other.to_v.kernel[...], layer.to_v.kernel[...])


# ---- which kernels -------------------------------------------------------------------------------

WIDE = ma.Call(1, 4096, 4096, 8, 8, 192, "bfloat16", value_head_dim=128)
NARROW = ma.Call(1, 4096, 4096, 8, 8, 64, "bfloat16", value_head_dim=128)
STREAM = ma.Stream(tokens_per_frame=4, frames_per_block=3, window=2)
PLAIN = ("dot_product", "memory_efficient")
PACKAGES = {"tokamax": "0.0.17", "transformer-engine-jax": "2.20.2", "fa4-jax": "0.1.0"}
TARGETS = ("NVIDIA H200", "TPU v5p", "cpu")


@pytest.mark.parametrize("target", TARGETS)
def test_auto_takes_a_kernel_that_can(target: str) -> None:
    plan = ma.plan(WIDE, target=ma.Target.named(target))
    assert plan.kernel.takes_value_dim and "H=192 V=128" in plan.explain()
    assert (plan.kernel.name in PLAIN) == (target == "cpu")


@pytest.mark.parametrize("kernel", [x for x in TABLE if x not in PLAIN])
@pytest.mark.parametrize("dims", [(192, 128), (64, 512)], ids=str)
def test_kernels_of_one_head_dim_say_what_they_pad(kernel: str, dims: tuple[int, int]) -> None:
    """The plan notes the padding, or refuses the padded head dim."""
    where = "TPU v5p" if kernel.startswith("tpu") else "NVIDIA H200"
    target = ma.Target.named(where, packages=tuple(PACKAGES.items()))
    call = replace(WIDE, head_dim=dims[0], value_head_dim=dims[1])
    call = replace(call, kv_len=512) if kernel == "tpu_few_keys" else call
    try:
        said = ma.plan(call, ma.AttentionConfig(attention=kernel), target=target).explain()
    except Unsupported as error:
        said = str(error)
    assert "padded to" in said
    check_golden(f"padded_heads/{kernel}_{dims[0]}_{dims[1]}", said)


def test_times_and_memory_are_of_padded_heads() -> None:
    """A kernel with a single head dim takes as long as with heads of the larger one.

    If V is the narrower, V and out are copied, and so are their gradients.
    """
    target = ma.Target.named("NVIDIA H200", packages=tuple(PACKAGES.items()))
    config, ring = (ma.AttentionConfig(attention=x) for x in ("cudnn", "ring"))
    assert "padded to" in ma.plan(NARROW, ring, {"context": 4}, target).explain()
    narrow, plain = (
        ma.plan(call, config, target=target) for call in (WIDE, replace(WIDE, value_head_dim=0))
    )
    times = [plan.kernel.microseconds(plan.call, target) for plan in (narrow, plain)]
    assert times[0] is not None and times[0] == times[1]
    parts = {part.what: part.bytes for part in estimate(narrow, True)}
    assert parts["copies padded to head dim 192"] == 2 * 2 * (8 * 4096 * 192 * 2)
    assert not [part for part in estimate(plain, True) if "padded" in part.what]


def test_a_call_says_its_head_dims() -> None:
    q, v = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 8))
    assert ma.Call.of(q, q, value_head_dim=8) == ma.Call.of(q, q) == ma.Call(1, 4, 4, 2, 2, 8)
    call = ma.Call.of(q, q, value_head_dim=6)
    assert call != ma.Call.of(q, q) and (call.head_dim, call.value_dim) == (8, 6)
    assert call.shape_text == "B=1 T=S=4 N=2 H=8 V=6 f32"
    with pytest.raises(InputError, match="value_head_dim"):
        ma.Call(1, 4, 4, 2, 2, 8, value_head_dim=-1)
    with pytest.raises(InputError, match="its B, S and K must be those of k"):
        ma.attention(q, q, v[:, :3])
