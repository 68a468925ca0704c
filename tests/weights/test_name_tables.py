"""LoRA under the names of published models, and with a user's own table, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn import weights
from tests.weights.models import check_added, product, refused

C = 4  # width of all tiny layers
Names = dict[str, "str | list[str]"]  # a file's name -> the layer, or the layers of its rows
AB, DOWN_UP, XLABS = ("lora_A", "lora_B"), ("lora_down", "lora_up"), ("down", "up")
PEFT = ("lora_A.default", "lora_B.default")


def model_of(layers: Any) -> nnx.Module:
    """Build a module with Linear layers of these names, as nested dictionaries."""
    tree: dict[str, Any] = {}
    for seed, layer in enumerate(layers):
        *path, last = layer.split(".")
        here = tree
        for part in path:
            here = here.setdefault(part, {})
        here[last] = nnx.Linear(C, C + 1, rngs=nnx.Rngs(seed))
    build = lambda x: nnx.Dict({k: build(v) for k, v in x.items()}) if isinstance(x, dict) else x  # noqa: E731
    return build(tree)


def check_merged(given_names: Names, begin: str = "", spelling: Any = AB, **how: Any) -> None:
    """Merge LoRA of all names, and compare each layer's rows with a product in float64."""
    parts = {n: [meant] if isinstance(meant, str) else meant for n, meant in given_names.items()}
    layers = [layer for those in parts.values() for layer in those]
    model = model_of(dict.fromkeys(layers))
    given, want, rng = {}, {}, np.random.default_rng(0)
    for name, those in parts.items():
        written = begin + (name.replace(".", "_") if begin.endswith("_") else name)
        shapes = ((2, C), (len(those) * (C + 1), 2))
        for kind, shape in zip(spelling, shapes, strict=True):
            given[f"{written}.{kind}.weight"] = rng.normal(size=shape).astype(np.float32)
        given[f"{written}.alpha"] = np.float32(1)
        rows = np.split(0.5 * product(given, written, spelling), len(those))
        want |= {f"{layer}.weight": own for layer, own in zip(those, rows, strict=True)}
    assert set(check_added(model, given, want, **how)) == set(layers)


def of_blocks(names: Names, count: int = 2) -> Names:
    """Repeat names with `#` for each block."""
    out: Names = {}
    for name, meant in names.items():
        for i in map(str, range(count) if "#" in name else range(1)):
            is_one = isinstance(meant, str)
            filled = [part.replace("#", i) for part in ([meant] if is_one else meant)]
            out[name.replace("#", i)] = filled[0] if is_one else filled
    return out


QKV, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
DOUBLE, SINGLE = "transformer_blocks.#", "single_transformer_blocks.#"
FLUX = of_blocks({
    "double_blocks.#.img_attn.qkv": [f"{DOUBLE}.attn.{x}" for x in QKV],
    "double_blocks.#.img_attn.proj": f"{DOUBLE}.attn.to_out.0",
    "double_blocks.#.img_mlp.0": f"{DOUBLE}.ff.net.0.proj",
    "double_blocks.#.img_mlp.2": f"{DOUBLE}.ff.net.2",
    "double_blocks.#.img_mod.lin": f"{DOUBLE}.norm1.linear",
    "double_blocks.#.txt_attn.qkv": [f"{DOUBLE}.attn.{x}" for x in ADDED],
    "double_blocks.#.txt_attn.proj": f"{DOUBLE}.attn.to_add_out",
    "double_blocks.#.txt_mlp.0": f"{DOUBLE}.ff_context.net.0.proj",
    "double_blocks.#.txt_mlp.2": f"{DOUBLE}.ff_context.net.2",
    "double_blocks.#.txt_mod.lin": f"{DOUBLE}.norm1_context.linear",
    "single_blocks.#.linear1": [*(f"{SINGLE}.attn.{x}" for x in QKV), f"{SINGLE}.proj_mlp"],
    "single_blocks.#.linear2": f"{SINGLE}.proj_out",
    "single_blocks.#.modulation.lin": f"{SINGLE}.norm.linear",
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
})  # fmt: skip
FLUX_XLABS = of_blocks({
    "double_blocks.#.processor.qkv_lora1": [f"{DOUBLE}.attn.{x}" for x in QKV],
    "double_blocks.#.processor.proj_lora1": f"{DOUBLE}.attn.to_out.0",
    "double_blocks.#.processor.qkv_lora2": [f"{DOUBLE}.attn.{x}" for x in ADDED],
    "double_blocks.#.processor.proj_lora2": f"{DOUBLE}.attn.to_add_out",
    "single_blocks.#.processor.qkv_lora": [f"{SINGLE}.attn.{x}" for x in QKV],
    "single_blocks.#.processor.proj_lora": f"{SINGLE}.proj_out",
})  # fmt: skip
QWEN = of_blocks({name: name for name in (
    "transformer_blocks.#.attn.to_q", "transformer_blocks.#.attn.to_k",
    "transformer_blocks.#.attn.to_v", "transformer_blocks.#.attn.add_q_proj",
    "transformer_blocks.#.attn.add_k_proj", "transformer_blocks.#.attn.add_v_proj",
    "transformer_blocks.#.attn.to_out.0", "transformer_blocks.#.attn.to_add_out",
    "transformer_blocks.#.img_mod.1", "transformer_blocks.#.txt_mod.1",
    "transformer_blocks.#.img_mlp.net.0.proj", "transformer_blocks.#.img_mlp.net.2",
    "transformer_blocks.#.txt_mlp.net.0.proj", "transformer_blocks.#.txt_mlp.net.2",
    "img_in", "txt_in", "proj_out", "norm_out.linear",
    "time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2",
)})  # fmt: skip
Z_BLOCKS = ("layers.#", "noise_refiner.#", "context_refiner.#")
Z_SAME = of_blocks({f"{b}.{x}": f"{b}.{x}" for b in Z_BLOCKS for x in (
    "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0",
)} | {x: x for x in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")})  # fmt: skip
Z_IMAGE = Z_SAME | of_blocks({
    **{f"{b}.attention.qkv": [f"{b}.attention.{x}" for x in QKV] for b in Z_BLOCKS},
    **{f"{b}.attention.out": f"{b}.attention.to_out.0" for b in Z_BLOCKS},
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
})  # fmt: skip
Z_DIFFUSERS = Z_SAME | of_blocks({x: x for b in Z_BLOCKS for x in (
    f"{b}.attention.to_q", f"{b}.attention.to_k", f"{b}.attention.to_v",
    f"{b}.attention.to_out.0",
)})  # fmt: skip
ADAPTIVE = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "prompt_adaln_single": "prompt_adaln",
    "audio_prompt_adaln_single": "audio_prompt_adaln",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}
LTX2_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn",
                   "video_to_audio_attn")  # fmt: skip
LTX2 = of_blocks({
    **{f"{DOUBLE}.{at}.{x}": f"{DOUBLE}.{at}.{x}" for at in LTX2_ATTENTIONS
       for x in (*QKV, "to_out.0", "to_gate_logits")},
    **{f"{DOUBLE}.{ff}.net.{x}": f"{DOUBLE}.{ff}.net.{x}" for ff in ("ff", "audio_ff")
       for x in ("0.proj", "2")},
    **{f"{theirs}.{x}": f"{ours}.{x}" for theirs, ours in ADAPTIVE.items()
       for x in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")},
    "patchify_proj": "proj_in",
    "audio_patchify_proj": "audio_proj_in",
    "proj_out": "proj_out",
    "audio_proj_out": "audio_proj_out",
})  # fmt: skip

OLD = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
PROCESSORS: Names = {
    f"{OLD}.processor.{x}_lora": f"{OLD}.{'to_out.0' if x == 'to_out' else x}"
    for x in (*QKV, "to_out")
}

PUBLISHED = {
    "old diffusers": (PROCESSORS, "unet.", XLABS),
    "flux by BFL": (FLUX, "", AB),
    "flux by ComfyUI": (FLUX, "diffusion_model.", AB),
    "flux by kohya": (FLUX, "lora_unet_", DOWN_UP),
    "flux by XLabs": (FLUX_XLABS, "", XLABS),
    "flux by XLabs, for ComfyUI": (FLUX_XLABS, "diffusion_model.", XLABS),
    "qwen by diffusers": (QWEN, "transformer.", AB),
    "qwen by ai-toolkit": (QWEN, "diffusion_model.", AB),
    "qwen by musubi": (QWEN, "lora_unet_", DOWN_UP),
    "qwen by OneTrainer": (QWEN, "lora_transformer_", DOWN_UP),
    "qwen by DiffSynth": (QWEN, "", PEFT),
    "qwen by DiffSynth, with its pipeline": (QWEN, "pipe.dit.", PEFT),
    "qwen by lightx2v": (QWEN, "", DOWN_UP),
    "z-image by ComfyUI": (Z_IMAGE, "diffusion_model.", AB),
    "z-image, flat": (Z_IMAGE, "lora_unet_", DOWN_UP),
    "z-image by ai-toolkit": (Z_DIFFUSERS, "diffusion_model.", AB),
    "z-image by musubi": (Z_DIFFUSERS, "lora_unet_", DOWN_UP),
    "ltx-2 by its trainer": (LTX2, "diffusion_model.", AB),
    "ltx-2, flat": (LTX2, "lora_unet_", DOWN_UP),
}  # fmt: skip


@pytest.mark.parametrize("program", PUBLISHED)
def test_published_names_are_merged(program: str) -> None:
    check_merged(*PUBLISHED[program])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_is_rounded_once_to_the_dtype_of_the_layer(dtype: str) -> None:
    """The test compares all rows of a tensor of three layers, with float16 matrices."""
    names = {"double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.{x}" for x in QKV]}
    (layers,), rng = names.values(), np.random.default_rng(0)
    model = model_of(layers)
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    before = weights.to_diffusers(model)
    a, b = (rng.normal(size=s).astype(np.float16) for s in ((2, C), (3 * C + 3, 2)))
    given = {f"{name}.{end}.weight": x for name in names for end, x in zip(AB, (a, b), strict=True)}
    weights.merge_lora(model, given, -2.0)
    change = -2.0 * b.astype(np.float64) @ a.astype(np.float64)
    for layer, rows in zip(layers, np.split(change, 3), strict=True):
        want = before[f"{layer}.weight"].astype(np.float64) + rows
        got = weights.to_diffusers(model)[f"{layer}.weight"]
        assert got.dtype == dtype
        np.testing.assert_allclose(
            got.astype(np.float64), want, rtol=float(jnp.finfo(dtype).eps), atol=1e-6
        )


@pytest.mark.parametrize(
    "last", ["final_layer.adaLN_modulation.1", "final_layer_adaLN_modulation_1"]
)
def test_the_last_shift_and_scale_of_flux_are_exchanged(last: str) -> None:
    model: Any = model_of(["norm_out.linear", "proj_out"])
    rng = np.random.default_rng(0)
    model.norm_out.linear = nnx.Linear(C, 2 * C, rngs=nnx.Rngs(0))
    begin = "lora_unet_" if "_1" in last else ""
    a, b, bias = rng.normal(size=(2, C)), rng.normal(size=(2 * C, 2)), rng.normal(size=2 * C)
    named = {"lora_A.weight": a, "lora_B.weight": b, "lora_B.bias": bias, "alpha": np.float32(1)}
    given = {f"{begin}{last}.{end}": x for end, x in named.items()}
    changes = {"norm_out.linear.weight": b @ a / 2, "norm_out.linear.bias": bias / 2}
    want = {name: np.roll(change, C, axis=0) for name, change in changes.items()}
    assert check_added(model, given, want) == ("norm_out.linear",)
    given = {n: x[1:] if "lora_B" in n else x for n, x in given.items()}
    refused(model, lambda: weights.merge_lora(model, given))


def test_control_lora_of_bfl_is_taken_without_its_scales() -> None:
    """Its norm scales and a layer of another width are left out on request."""
    layers = [f"transformer_blocks.0.attn.{x}" for x in ADDED] + ["x_embedder"]
    model, rng, begin = model_of(layers), np.random.default_rng(0), "double_blocks.0.txt_attn"
    shapes = {"lora_A.weight": (2, C), "lora_B.weight": (3 * C + 3, 2), "lora_B.bias": (3 * C + 3,)}
    given = {f"{begin}.qkv.{x}": rng.normal(size=shape) for x, shape in shapes.items()}
    given[f"{begin}.norm.key_norm.scale"] = np.ones(C)
    last = "img_in"
    given |= {
        f"{last}.lora_A.weight": np.ones((2, 2 * C)),
        f"{last}.lora_B.weight": np.ones((C + 1, 2)),
    }
    assert "strict=False" in refused(model, lambda: weights.merge_lora(model, given)).remedy
    a, b, bias = (given[f"{begin}.qkv.{x}"] for x in shapes)
    each = zip(layers, np.split(b @ a, 3), np.split(bias, 3), strict=False)
    want = {
        f"{x}.{end}": y for x, *own in each for end, y in zip(("weight", "bias"), own, strict=True)
    }
    found = check_added(model, given, want, strict=False)
    assert found.left_out == (f"{begin}.norm.key_norm.scale", last)


# ---- a user's table ------------------------------------------------------------------------------

OWN: dict[str, Any] = {
    "layer.*.query": "blocks.*.to_q",
    "layer.*.kv": ["blocks.*.to_k", "blocks.*.to_v"],
    "head": "proj_out",
}
MINE = of_blocks({
    "layer.#.query": "blocks.#.to_q", "layer.#.kv": ["blocks.#.to_k", "blocks.#.to_v"],
    "head": "proj_out",
})  # fmt: skip


@pytest.mark.parametrize("begin", ["", "transformer.", "lora_unet_"])
def test_a_table_of_ones_own(begin: str, tmp_path: Path) -> None:
    check_merged(MINE, begin, names=OWN)
    lines = "layer.*.query: blocks.*.to_q\nlayer.*.kv: [blocks.*.to_k, blocks.*.to_v]\n"
    (tmp_path / "names.yml").write_text(f"{lines}head: proj_out\n")
    check_merged(MINE, begin, names=tmp_path / "names.yml")


def test_a_table_may_have_more_layers_than_a_file() -> None:
    model = model_of(["blocks.0.to_q", "blocks.0.to_k", "blocks.0.to_v", "proj_out"])
    given = {"head.lora_A.weight": np.ones((2, C)), "head.lora_B.weight": np.ones((C + 1, 2))}
    assert weights.lora_prefix(model, given, OWN) == ""
    assert weights.check_lora(model, given, names=OWN) == ("proj_out",)


WRONG: dict[str, Any] = {
    "list": ["layer.*.query"],
    "nothing": {},
    "number": {"head": 3},
    "stars": OWN | {"layer.*.query": "blocks.0.to_q"},
    "missing": OWN | {"layer.*.query": "blocks.*.to_qq"},
    "missing_part": {"layer.*.kv": ["blocks.*.to_k", "values.*"]},
    "ambiguous": {"layer.*.x": "blocks.*.to_q", "layer.0.x": "proj_out"},
    "ambiguous_with_a_layer": {"blocks.*.to_q": "blocks.*.to_k"},
    "unused": {"another": "proj_out"},
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tables_are_refused(kind: str) -> None:
    model = model_of([f"blocks.{i}.to_{x}" for i in range(2) for x in "qkv"] + ["proj_out"])
    given = {"head.lora_A.weight": np.ones((2, C)), "head.lora_B.weight": np.ones((C + 1, 2))}
    load = lambda: weights.merge_lora(model, given, names=WRONG[kind])  # noqa: E731
    refused(model, load, f"lora_table_{kind}")


def test_a_table_that_is_no_yaml(tmp_path: Path) -> None:
    path, model = tmp_path / "names.yml", model_of(["a"])
    for text in ("a: [", "- a", "a: a\na: a\n", ""):
        path.write_text(text)
        error = refused(model, lambda: weights.merge_lora(model, {}, names=path))
        assert error.setting == "names" and str(path) in str(error)
    refused(model, lambda: weights.merge_lora(model, {}, names=tmp_path / "none.yml"))
