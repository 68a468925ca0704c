"""The modules, called and differentiated, plain and inside of NNX's transformations."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from tests.fuzz.calls import config_text
from tests.fuzz.case import Case, Machine
from tests.fuzz.categories.meshes import draw_axes, mesh_settings, mesh_text
from tests.fuzz.kernels import draw_settings
from tests.fuzz.mask_trees import Sizes, Tree, draw_tree
from tests.fuzz.module_checks import check_of

SETUP = """\
from flax import nnx
rng = np.random.default_rng({seed})
draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), {dtype!r})
layer = ma.{kind}({words}, config=config, dtype={dtype!r}, rngs=nnx.Rngs({seed}){mesh})
nnx.update(layer, jax.tree.map(
    lambda x: x + 0.2 * jnp.asarray(rng.standard_normal(x.shape), x.dtype),
    nnx.state(layer, nnx.Param)))
x, text, image = draw{x}, {text}, {image}
mask, bias = {mask}, {bias}
rotary = {rotary}
"""
CALLS = {
    "FlaxAttention": "layer(x, rotary_emb=rotary, mask=mask, bias=bias)",
    "CrossAttention": "layer(x, text, rotary_emb=rotary, mask=mask, bias=bias{image})",
    "CrossAttention kv": "layer(x, kv=layer.compute_kv(text{kv}), rotary_emb=rotary, mask=mask,"
    " bias=bias)",
    "JointAttention": "jnp.concatenate([y.ravel() for y in layer(x, text, rotary_emb=rotary,"
    " mask=mask, bias=bias)])",
}
TRANSFORMS = (
    "", "", "run = nnx.jit(run)", "run = nnx.remat(run)", "run = nnx.jit(nnx.remat(run))",
    "run = ma.remat(run, ma.AttentionConfig(remat_policy={policy!r}))",
    "run = nnx.jit(ma.remat(run, ma.AttentionConfig(remat_policy={policy!r})))",
    "once = run\ndef run(layer, x):\n    return nnx.vmap(lambda y: once(layer, y))(x[None])[0]",
    "once = run\ndef run(layer, x):\n    step = lambda c, y: (c, once(layer, y))\n"
    "    along = (nnx.Carry, 0)\n"
    "    return nnx.scan(step, in_axes=along, out_axes=along)(0.0, x[None])[1][0]",
)  # fmt: skip
RUN = """\
out = run(layer, x)
way = draw(*out.shape)
loss = lambda layer, x: (run(layer, x).astype('float32') * way.astype('float32')).sum()
grads, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, x)
"""
NORMS = (None, "rms_norm", "layer_norm", "rms_norm_across_heads")
POLICIES = ("FULL", "SAVE_ATTENTION", "SAVE_ATTENTION_AND_MATMUL", "MATMUL_WITHOUT_BATCH")


class Built(NamedTuple):
    """Hold what a module is built and called with."""

    kind: str
    sizes: Sizes  # T and S of the attention
    width: int
    text_width: int
    image: tuple[int, int] | None  # tokens and channels
    norm: str | None
    eps: float
    scale: float | None
    theta: float | None
    style: str
    tree: Tree | None
    bias: bool
    dtype: str


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a module, what it is called with and what is around it."""
    on_mesh = machine.devices > 1 and rng.random() < 0.25
    axes = draw_axes(rng, machine.devices) if on_mesh else {}
    built = _built(rng, machine, axes)
    settings = mesh_settings(rng, machine, axes) if on_mesh else draw_settings(rng, machine)
    if rng.random() < 0.7:
        settings["cross_attention"] = settings["attention"]
    call = rng.choice([name for name in CALLS if name.split()[0] == built.kind])
    how = rng.choice(TRANSFORMS).replace("{policy!r}", repr(rng.choice(POLICIES)))
    text = (
        config_text(settings) + (mesh_text(axes) if on_mesh else "") + _setup(built, rng, on_mesh)
    )
    source = text + _run(built, call) + how + "\n" + RUN
    facts = {
        "kind": call,
        "how": how,
        "kernel": settings["attention"],
        "mask": built.tree and built.tree.text(),
    }
    facts["strategy"] = settings.get("context_parallel")
    return Case("modules", seed, source, check_of(built), facts=facts, seconds=120)


def _built(rng: Random, machine: Machine, axes: dict[str, int]) -> Built:
    kind = rng.choice(["FlaxAttention", "CrossAttention", "JointAttention"])
    tensor, batch = axes.get("tensor", 1), axes.get("data", 1) * axes.get("fsdp", 1)
    heads, kv = rng.choice([(2, 2), (4, 2), (2, 1), (3, 3)])
    t, s = rng.choice([8, 7, 16, 20]), rng.choice([3, 8, 12])
    lengths = {"FlaxAttention": (t, t), "CrossAttention": (t, s), "JointAttention": (s + t, s + t)}[
        kind
    ]
    sizes = Sizes(
        batch * rng.choice([1, 2]), *lengths, heads * tensor, kv * tensor, rng.choice([6, 8, 16])
    )
    tree = draw_tree(rng, sizes, 2) if rng.random() < 0.5 else None
    image = (rng.choice([1, 5, 8]), 6) if kind == "CrossAttention" and rng.random() < 0.4 else None
    return Built(
        kind, sizes, rng.choice([8, 12]), rng.choice([8, 10]), image,
        rng.choice(NORMS), rng.choice([1e-5, 1e-6]), rng.choice([None, None, 0.7]),
        rng.choice([None, 1e4, 100.0]), rng.choice(["interleaved", "half"]),
        tree, rng.random() < 0.2, "bfloat16" if machine.platform == "gpu" else "float32",
    )  # fmt: skip


def tokens(built: Built) -> tuple[int, int]:
    """Return the tokens of the states and of the text."""
    s = built.sizes
    return (s.t - 3, 3) if built.kind == "JointAttention" else (s.t, s.s)


def _setup(built: Built, rng: Random, on_mesh: bool) -> str:
    s, (t, other) = built.sizes, tokens(built)
    image = built.image
    return SETUP.format(
        seed=rng.randrange(10**6), dtype=built.dtype, kind=built.kind, words=_words(built, rng),
        mesh=", mesh=mesh" if on_mesh else "", x=(s.b, t, built.width),
        text="None" if built.kind == "FlaxAttention" else f"draw{(s.b, other, built.text_width)}",
        image=f"draw{(s.b, *image)}" if image else "None",
        mask=built.tree.text() if built.tree else "None",
        bias=f"draw{(1, s.n, s.t, s.s)}" if built.bias else "None",
        rotary=f"ma.rope_1d({s.h}, {s.t}, {built.theta}, style={built.style!r})"
        if built.theta else "None",
    )  # fmt: skip


def _words(built: Built, rng: Random) -> str:
    s = built.sizes
    words: dict[str, Any] = {"query_dim": built.width, "heads": s.n, "kv_heads": s.k}
    words |= {"dim_head": s.h, "qk_norm": built.norm, "eps": built.eps, "scale": built.scale}
    words |= {"bias": rng.random() < 0.5, "out_bias": rng.random() < 0.5}
    if built.kind == "CrossAttention":
        words |= {"cross_attention_dim": built.text_width}
    if built.image or built.kind == "JointAttention":
        words |= {"added_kv_proj_dim": built.image[1] if built.image else built.text_width}
    return ", ".join(f"{key}={value!r}" for key, value in words.items())


def _run(built: Built, call: str) -> str:
    image = (", encoder_hidden_states_image=image", ", image") if built.image else ("", "")
    return f"def run(layer, x):\n    return {CALLS[call].format(image=image[0], kv=image[1])}\n"
