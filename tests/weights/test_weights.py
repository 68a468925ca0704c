"""Names, layouts, files and LoRA: bit for bit both ways, onto a mesh, and one error for all that
does not fit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxattn as ma
from maxattn import sharding, weights
from maxattn.errors import WeightsError
from tests.golden_text import check_golden

SIZES: dict[str, Any] = {
    "query_dim": 16,
    "heads": 2,
    "dim_head": 8,
    "qk_norm": "rms_norm_across_heads",
    "bias": True,
}


class Block(nnx.Module):
    diffusers_names: ClassVar[dict[str, str]] = {
        "ffn.up": "ffn.net.0.proj",
        "table": "scale_shift_table",
    }

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attn1 = ma.FlaxAttention(**SIZES, rngs=rngs)
        self.ffn = nnx.Dict(up=nnx.Linear(16, 32, rngs=rngs))
        self.table = nnx.Param(jax.random.normal(rngs.params(), (1, 6, 16)))


class Model(nnx.Module):
    """One of each layer, blocks in a list, and blocks stacked along an axis."""

    diffusers_stacked: ClassVar[tuple[str, ...]] = ("stacked",)

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patch = nnx.Conv(3, 16, (1, 2, 4), rngs=rngs)
        self.words = nnx.Embed(5, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.stacked = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(
            jax.random.split(jax.random.key(7), 3)
        )
        self.norm = nnx.LayerNorm(16, rngs=rngs)


def values(module: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in flat}


def equal(a: nnx.Module, b: nnx.Module) -> None:
    ours, theirs = values(a), values(b)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def mesh() -> jax.sharding.Mesh:
    return ma.AttentionConfig(
        ici_data_parallelism=1, ici_fsdp_parallelism=4, ici_tensor_parallelism=2
    ).make_mesh()


# ---- names and layouts ---------------------------------------------------------------------------


def test_names_and_shapes_are_diffusers():
    lines = [
        f"{entry.name} {list(entry.shape)}"
        for entry in weights.entries(Model(nnx.Rngs(0)), "transformer.")
    ]
    check_golden("weights/names", "\n".join(lines))


def test_layouts_are_torchs():
    model = Model(nnx.Rngs(0))
    state = weights.to_diffusers(model)
    x = jax.random.normal(jax.random.key(1), (2, 16))
    up = model.blocks[0].ffn["up"]
    want = x @ state["blocks.0.ffn.net.0.proj.weight"].T + state["blocks.0.ffn.net.0.proj.bias"]
    np.testing.assert_allclose(up(x), want, atol=1e-6)
    np.testing.assert_array_equal(
        state["patch.weight"], np.asarray(model.patch.kernel[...]).transpose(4, 3, 0, 1, 2)
    )
    third = np.asarray(model.stacked.attn1.to_out.kernel[...])[2]
    np.testing.assert_array_equal(state["stacked.2.attn1.to_out.0.weight"], third.T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways_is_bit_for_bit(dtype: str, tmp_path: Path):
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(9))
    for model in (one, other):
        nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model, nnx.Param)))
    files = weights.save_diffusers(one, tmp_path / "whole", shard_bytes=4000)
    index = json.loads(files[-1].read_text())
    assert len(files) > 3
    assert index["weight_map"].keys() == weights.to_diffusers(one).keys()
    assert index["metadata"]["total_size"] == sum(
        x.nbytes for x in weights.to_diffusers(one).values()
    )
    assert not list((tmp_path / "whole").glob("*.partial"))
    assert weights.load_diffusers(other, tmp_path / "whole") == weights.Loaded()
    equal(one, other)
    # What is written again is the same, file for file.
    for file in files:
        again = weights.save_diffusers(other, tmp_path / "again", shard_bytes=4000)
        assert {f.name for f in again} == {f.name for f in files}
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
        break


def test_onto_a_mesh_without_arrays_before(tmp_path: Path):
    one = Model(nnx.Rngs(0))
    weights.save_diffusers(one, tmp_path)
    empty = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    weights.load_diffusers(empty, tmp_path, mesh=mesh())
    equal(one, empty)
    kernel = empty.blocks[1].attn1.to_q.kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) == (4, 8)
    # Arrays that have a place keep it.
    placed = Model(nnx.Rngs(9))
    sharding.place(placed, mesh())
    weights.load_diffusers(placed, tmp_path)
    equal(one, placed)
    assert placed.blocks[1].attn1.to_q.kernel[...].sharding == kernel.sharding


def test_a_parameter_keeps_its_dtype():
    model = Model(nnx.Rngs(0))
    state = {k: v.astype(ml_dtypes.bfloat16) for k, v in weights.to_diffusers(model).items()}
    weights.load_diffusers(model, state)
    assert {x.dtype for x in values(model).values()} == {np.dtype("float32")}
    np.testing.assert_array_equal(
        values(model)["patch.kernel"].transpose(4, 3, 0, 1, 2), state["patch.weight"]
    )


# ---- what does not fit ---------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_said_at_once_and_nothing_changes():
    model = Model(nnx.Rngs(0))
    before, state = values(model), weights.to_diffusers(Model(nnx.Rngs(5)))
    del state["norm.bias"], state["stacked.1.attn1.to_q.weight"]
    state |= {
        "blocks.2.attn1.to_q.weight": np.zeros((16, 16)),
        "patch.weight": np.zeros((16, 3, 2, 2, 4), np.float32),
    }
    with pytest.raises(WeightsError) as error:
        weights.load_diffusers(model, state)
    check_golden("weights/does_not_fit", str(error.value))
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, before[name])


def test_a_prefix_is_suggested_and_taken():
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(9))
    state = {f"model.transformer.{key}": value for key, value in weights.to_diffusers(one).items()}
    with pytest.raises(WeightsError, match=r"pass prefix='model\.transformer\.'"):
        weights.load_diffusers(other, state)
    weights.load_diffusers(other, state | {"vae.weight": np.zeros(3)}, prefix="model.transformer.")
    equal(one, other)


def test_not_strict_says_what_was_left(caplog: pytest.LogCaptureFixture):
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(9))
    state = weights.to_diffusers(one)
    del state["norm.bias"], state["stacked.1.attn1.to_q.weight"]
    before = values(other)
    found = weights.load_diffusers(other, state | {"more": np.zeros(2)}, strict=False)
    assert found == weights.Loaded(("norm.bias", "stacked.1.attn1.to_q.weight"), ("more",))
    assert "missing: norm.bias" in caplog.text
    # A stacked parameter is filled whole or not at all.
    np.testing.assert_array_equal(
        values(other)["stacked.attn1.to_q.kernel"], before["stacked.attn1.to_q.kernel"]
    )
    np.testing.assert_array_equal(values(other)["norm.scale"], values(one)["norm.scale"])


def broken(folder: Path, kind: str) -> Path:
    """Make a folder that cannot be read."""
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    files = weights.save_diffusers(model, folder, shard_bytes=20)
    if kind == "a missing file":
        files[0].unlink()
    elif kind == "half a file":
        files[0].write_bytes(files[0].read_bytes()[:-9])
    elif kind == "a lost tensor":
        save_file({"other": np.zeros(2, np.float32)}, files[0])
    elif kind == "a pickle":
        [file.unlink() for file in files]
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif kind == "nothing":
        [file.unlink() for file in files]
    elif kind == "two models":
        files[-1].unlink()
    return folder


@pytest.mark.parametrize(
    "kind", ["a missing file", "half a file", "a lost tensor", "a pickle", "nothing", "two models"]
)
def test_a_folder_that_cannot_be_read(kind: str, tmp_path: Path):
    folder = broken(tmp_path / "model", kind)
    with pytest.raises(WeightsError) as error:
        weights.load_diffusers(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), folder)
    said = re.sub(
        r"\(.*\)", "(...)", str(error.value).replace(str(tmp_path), "FOLDER")
    )  # safetensors' own words
    check_golden(f"weights/{kind.replace(' ', '_')}", said)


@pytest.mark.parametrize(
    "said", ["{", "{}", "[1]", '{"weight_map": {"weight": 1}}', '{"weight_map": []}']
)
def test_a_broken_index(said: str, tmp_path: Path):
    folder = broken(tmp_path / "model", "sharded")
    next(folder.glob("*.json")).write_text(said)
    with pytest.raises(WeightsError) as error:
        weights.load_diffusers(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), folder)
    text = str(error.value).replace(str(tmp_path), "FOLDER")
    check_golden("weights/index_not_json" if said == "{" else "weights/index_without_map", text)


LINEAR = {"weight": np.full((4, 4), 2, np.float32), "bias": np.full(4, 3, np.float32)}
NO_WEIGHTS: dict[str, tuple[Any, Any]] = {
    "none": ("layer", None),
    "lists": ("layer", {"weight": [[1.0] * 4] * 4, "bias": [0.0] * 4}),
    "numbered": ("layer", {0: LINEAR["weight"]}),
    "no_module": (None, LINEAR),
    "int8": ("layer", {k: v.astype(np.int8) for k, v in LINEAR.items()}),
    "bool": ("layer", {**LINEAR, "bias": np.ones(4, bool)}),
    "complex": ("layer", {**LINEAR, "bias": np.ones(4, np.complex64)}),
    "float8": ("layer", {**LINEAR, "bias": np.ones(4, ml_dtypes.float8_e4m3fn)}),
    "too_large": ("float16", {**LINEAR, "bias": np.array([1, -7e4, 2, np.inf], np.float32)}),
    "bfloat16_too_large": (
        "float16",
        {**LINEAR, "bias": np.array([1, -7e4, 2, 3], ml_dtypes.bfloat16)},
    ),
}


@pytest.mark.parametrize("way", ["state dict", "file"])
@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_what_is_no_weights_is_refused_and_nothing_changes(kind: str, way: str, tmp_path: Path):
    what, tensors = NO_WEIGHTS[kind]
    if way == "file":
        if kind in ("none", "lists", "numbered"):
            pytest.skip("no file holds it")
        save_file(tensors, tmp_path / "x.safetensors")
        tensors = tmp_path
    module: Any = what and nnx.Linear(
        4, 4, param_dtype=what if what == "float16" else "float32", rngs=nnx.Rngs(0)
    )
    before = values(module) if module else {}
    with pytest.raises(WeightsError) as error:
        weights.load_diffusers(module, tensors)
    check_golden(f"weights/no_weights_{kind}", str(error.value))
    for name, array in before.items():
        np.testing.assert_array_equal(values(module)[name], array)


def test_the_largest_float16_and_what_is_infinite_already_are_loaded():
    layer = nnx.Linear(4, 4, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    bias = np.array([65504, -65519, np.inf, np.nan], np.float32)
    weights.load_diffusers(layer, {**LINEAR, "bias": bias})
    np.testing.assert_array_equal(
        values(layer)["bias"], np.array([65504, -65504, np.inf, np.nan], np.float16)
    )


class Placed(nnx.Linear):
    """A layer with a parameter of integers."""

    places: nnx.Param[jax.Array]


def test_integers_are_loaded_where_the_parameter_holds_them():
    layer = Placed(4, 4, rngs=nnx.Rngs(0))
    layer.places = nnx.Param(jnp.zeros(3, jnp.int32))
    weights.load_diffusers(layer, {**LINEAR, "places": np.arange(3, dtype=np.int32)})
    assert values(layer)["places"].tolist() == [0, 1, 2]


def test_weights_of_a_module_without_arrays_are_refused(tmp_path: Path):
    empty = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(WeightsError) as error:
        weights.to_diffusers(empty)
    check_golden("weights/no_arrays", str(error.value))
    with pytest.raises(WeightsError):
        weights.save_diffusers(empty, tmp_path)
    assert not list(tmp_path.iterdir())


# ---- LoRA ----------------------------------------------------------------------------------------


def lora(
    rank: int = 2, alpha: float | None = None, names: tuple[str, str] = ("lora_A", "lora_B")
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for layer in ("blocks.1.attn1.to_q", "blocks.1.attn1.to_out.0", "stacked.2.attn1.to_v"):
        found[f"{layer}.{names[0]}.weight"] = rng.normal(size=(rank, 16)).astype(np.float32)
        found[f"{layer}.{names[1]}.weight"] = rng.normal(size=(16, rank)).astype(np.float32)
        if alpha is not None:
            found[f"{layer}.alpha"] = np.float32(alpha)
    return found


@pytest.mark.parametrize(("alpha", "share"), [(None, 1.0), (1.0, 0.5)])
def test_lora_is_added_to_its_projections_alone(alpha: float | None, share: float):
    model, plain = Model(nnx.Rngs(0)), weights.to_diffusers(Model(nnx.Rngs(0)))
    change = lora(alpha=alpha)
    merged = weights.merge_lora(
        model, {f"transformer.{k}": v for k, v in change.items()}, 0.7, prefix="transformer."
    )
    assert len(merged) == 3
    for name, array in weights.to_diffusers(model).items():
        layer = name.removesuffix(".weight")
        want = plain[name]
        if layer in merged:
            want = (
                want
                + 0.7 * share * change[f"{layer}.lora_B.weight"] @ change[f"{layer}.lora_A.weight"]
            )
        np.testing.assert_allclose(array, want, atol=1e-5, err_msg=name)


def test_lora_in_a_file_under_older_names(tmp_path: Path):
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    save_file(lora(names=("lora.down", "lora.up")), tmp_path / "lora.safetensors")
    weights.merge_lora(one, tmp_path / "lora.safetensors")
    weights.merge_lora(other, lora())
    equal(one, other)
    assert load_file(tmp_path / "lora.safetensors")


def shapes(layer: str, down: tuple[int, int], up: tuple[int, int]) -> dict[str, np.ndarray]:
    return {f"{layer}.lora_A.weight": np.zeros(down), f"{layer}.lora_B.weight": np.zeros(up)}


WRONG = {
    "no layer": shapes("blocks.9.attn1.to_q", (2, 16), (16, 2)),
    "half": {"blocks.0.attn1.to_q.lora_A.weight": np.zeros((2, 16))},
    "shape": shapes("blocks.0.attn1.to_q", (2, 8), (16, 2)),
    "rank": shapes("blocks.0.attn1.to_q", (3, 16), (16, 2)),
    "name": {"blocks.0.attn1.to_q.weight": np.zeros((16, 16))},
    "alpha": {**lora(), "blocks.0.attn1.to_k.alpha": np.float32(1)},
    "nothing": {},
    "rank zero": shapes("blocks.0.attn1.to_q", (0, 16), (16, 0)),
    "four axes": shapes("blocks.0.attn1.to_q", (2, 16, 1, 1), (16, 2, 1, 1)),  # type: ignore[arg-type]
    "three alphas": {**lora(), "blocks.1.attn1.to_q.alpha": np.ones(3, np.float32)},
    "infinite alpha": {**lora(), "blocks.1.attn1.to_q.alpha": np.float32(np.inf)},
    "two spellings": {**lora(), **lora(names=("lora.down", "lora.up"))},
    "integers": {**lora(), "blocks.1.attn1.to_q.lora_A.weight": np.ones((2, 16), np.int8)},
    "lists": {**lora(), "blocks.1.attn1.to_q.lora_A.weight": [[1.0] * 16]},
    "no tensors": None,
}


@pytest.mark.parametrize("kind", WRONG)
def test_lora_that_does_not_fit(kind: str):
    model = Model(nnx.Rngs(0))
    before = values(model)
    with pytest.raises(WeightsError) as error:
        weights.merge_lora(model, WRONG[kind])
    check_golden(f"weights/lora_{kind.replace(' ', '_')}", str(error.value))
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", None, np.ones(2)])
def test_a_scale_of_lora_is_a_finite_number(scale: Any):
    model = Model(nnx.Rngs(0))
    before = values(model)
    with pytest.raises(WeightsError) as error:
        weights.merge_lora(model, lora(), scale)
    assert error.value.setting == "scale"
    if isinstance(scale, float) and scale != scale:
        check_golden("weights/lora_scale", str(error.value))
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize(("dtype", "size"), [("float16", 300.0), ("float32", 1e20)])
def test_a_change_that_the_dtype_does_not_hold_changes_nothing(dtype, size):
    model = Model(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model)))
    before, change = (
        values(model),
        {name: x * 0 + size for name, x in lora().items() if not name.endswith("alpha")},
    )
    *_, last = sorted(name for name in change if "lora_A" in name)
    change |= {name: x * 0 for name, x in change.items() if name != last and "lora_A" in name}
    with pytest.raises(WeightsError) as error:
        weights.merge_lora(model, change)
    check_golden(f"weights/lora_beyond_{dtype}", str(error.value))
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, before[name])


def test_an_alpha_of_one_axis_is_taken():
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    change = lora(alpha=4.0)
    weights.merge_lora(one, change)
    weights.merge_lora(
        other, {k: v.reshape(1) if k.endswith("alpha") else v for k, v in change.items()}
    )
    equal(one, other)


def test_one_linear_layer_is_a_module_too():
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    state = weights.to_diffusers(layer)
    assert {k: v.shape for k, v in state.items()} == {"weight": (2, 3), "bias": (2,)}
    weights.load_diffusers(
        layer, {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
    )
    np.testing.assert_array_equal(layer(jnp.ones((1, 3))), [[3, 3]])
