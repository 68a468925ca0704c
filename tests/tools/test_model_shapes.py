"""Named shapes, shapes in a user's notation, and those of a program's sections."""

from __future__ import annotations

import jax
import pytest

from maxattn.errors import InputError
from maxattn.measuring.passes import random_inputs
from maxattn.streaming import Stream
from maxattn.tools.known_models import MODELS, STREAM_BLOCKS
from maxattn.tools.model_shapes import SHAPES, of_sections, read


def test_sizes_follow_from_the_models():
    # Wan: frames / 4 + 1, height and width / 16; a frame of 832 x 480 is then 52 x 30 tokens.
    for name, width, height in (("wan-1.3b-480p", 832, 480), ("wan-14b-720p", 1280, 720)):
        assert SHAPES[name].q_len == (81 // 4 + 1) * (width // 16) * (height // 16)
    assert SHAPES["flux-1024"].q_len == (1024 // 16) ** 2 + 512
    assert (
        SHAPES["sdxl-64"].q_len == (1024 // 8 // 2) ** 2
        and SHAPES["sdxl-32"].q_len == (1024 // 8 // 4) ** 2
    )


@pytest.mark.parametrize("name", STREAM_BLOCKS)
def test_a_block_attends_as_one_of_its_stream_over_a_full_cache(name):
    """Its lengths equal those of the cache that the stream makes."""
    model, frames, window = STREAM_BLOCKS[name]
    stream = Stream(MODELS[model].tokens_per_frame, frames, window)
    cache = jax.eval_shape(lambda: stream.cache(layers=1, batch=1, kv_heads=1, dim_head=8))
    shape, video = SHAPES[name], SHAPES[model]
    assert (shape.q_len, shape.kv_len) == (cache.tokens, cache.k.shape[2])
    assert (shape.heads, shape.head_dim) == (video.heads, video.head_dim)
    assert video.q_len % stream.tokens_per_frame == 0
    assert shape.role == "self", "the setting of self-attention governs it"


@pytest.mark.parametrize("name", SHAPES)
def test_every_name_is_a_call(name):
    call = read(name).call()
    assert call.dtype == "bfloat16" and call.heads == call.kv_heads
    assert (call.role == "cross" or name in STREAM_BLOCKS) == (call.q_len != call.kv_len)
    assert call.mask.is_full == (not name.startswith("swba"))


def test_numbers():
    shape = read("2,64,77,8,32,4")
    sizes = shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.head_dim
    assert sizes == (2, 64, 77, 8, 32)
    assert (shape.role, shape.call().kv_heads) == ("cross", 4)
    assert read("2,64,64,8,32").role == "self"


def test_values_of_another_head_dim():
    """A shape has V after H, and operations and memory depend on both."""
    shape, plain = read("2,64,64,8,32/16,4"), read("2,64,64,8,32,4")
    assert (shape.call().head_dim, shape.call().value_dim, shape.call().kv_heads) == (32, 16, 4)
    assert shape.call().shape_text == "B=2 T=S=64 N=8 K=4 H=32 V=16 bf16"
    assert read("2,64,64,8,32/32,4").call() == plain.call()
    assert 4 * shape.operations == 3 * plain.operations
    q, k, v, dout = random_inputs(shape.call(), 1)[0]
    assert (q.shape[3], k.shape[3]) == (32, 32) and v.shape == (2, 64, 4, 16)
    assert dout.shape == (2, 64, 8, 16)


NO_SHAPES = (
    " 1,2,3 1,2,3,4,5,6,7 0,1,1,1,1 1,a,1,1,1 -1,2,2,2,2 1,8,8,4,8,3 1,8,8,4,8/ 1,8,8,4,/8"
    " 1,8,8,4,8/8/8 1,8,8/8,4,8"
)
LARGE = (
    *("1," + "9" * 5000 + ",8,8,8", "1,8,8,8," + str(2**31), "1,2,3,\u0664,5"),
    *("1,8,8,10000000000,8,7", "1,8,8,2147483647,8,2"),
)


@pytest.mark.parametrize("text", [*NO_SHAPES.split(" "), *LARGE], ids=lambda text: text[:20])
def test_what_is_no_shape(text):
    with pytest.raises(InputError) as error:
        read(text)
    assert len(str(error.value)) < 1000


def test_sections():
    model = {"heads": 4, "dim_head": 24, "patch": [1, 6, 6]}
    clip = {"data": {"frames": 5, "canvas": 12}, "training": {"batch_size": 64}}
    (found,) = of_sections({"model": model} | clip)
    assert (found.batch, found.q_len, found.heads, found.head_dim) == (64, 20, 4, 24)
    assert found.role == "self"
    found = of_sections({"model": {"heads": 2, "dim_head": 8, "tokens": 100, "text_tokens": 7}})
    sizes = [(s.batch, s.q_len, s.kv_len, s.role) for s in found]
    assert sizes == [(1, 100, 100, "self"), (1, 100, 7, "cross")]
    names = ["wan-cross", "sdxl-64"]
    assert [s.name for s in of_sections({"model": {"shapes": names}})] == names
    for little in ({}, None, {"heads": 2}, {"heads": 2, "dim_head": 8, "patch": 3}):
        assert of_sections({"model": little}) == of_sections({}) == ()


SOUND = {"heads": 2, "dim_head": 8, "tokens": 5}
CLIP = {"heads": 2, "dim_head": 8, "patch": [1, 2, 2]}
NO_SIZES = (True, False, 0, -1, -(10**30), 10**30, 10**5000, 2.0, "abc", "5", float("nan"))


@pytest.mark.parametrize("value", NO_SIZES, ids=lambda value: str(type(value)))
@pytest.mark.parametrize(
    "key",
    ["model.heads", "model.dim_head", "model.tokens", "model.text_tokens", "training.batch_size"],
)
def test_a_size_that_is_none_is_refused_by_its_key(key, value):
    section, _, name = key.partition(".")
    sections = {"model": dict(SOUND), "training": {}}
    sections[section][name] = value
    with pytest.raises(InputError) as error:
        of_sections(sections)
    assert error.value.setting == key and error.value.remedy and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("data", "patch", "key"),
    [
        ({"frames": True, "canvas": 8}, [1, 2, 2], "data.frames"),
        ({"frames": 4, "canvas": "8"}, [1, 2, 2], "data.canvas"),
        ({"frames": 4, "height": -8, "width": 8}, [1, 2, 2], "data.height"),
        ({"frames": 4, "height": 8, "width": 2**40}, [1, 2, 2], "data.width"),
        ({"frames": 4, "canvas": 8}, [1, 0, 2], "model.patch[1]"),
        ({"frames": 4, "canvas": 8}, [1, True, 2], "model.patch[1]"),
        ({"frames": 4, "canvas": 8}, [2, 2], "model.patch"),
        ({"frames": 4, "canvas": 1}, [1, 2, 2], "model.patch"),
        ({"frames": 2**30, "canvas": 2**30}, [1, 2, 2], "model.patch"),
    ],
)
def test_a_clip_that_is_none_is_refused_by_its_key(data, patch, key):
    with pytest.raises(InputError) as error:
        of_sections({"model": CLIP | {"patch": patch}, "data": data})
    assert error.value.setting == key


@pytest.mark.parametrize("model", [{"heads": [5, 10]}, {"tokens": {"a": 1}}, {"heads": None}])
def test_what_a_program_means_otherwise_is_no_shape(model):
    assert of_sections({"model": SOUND | model}) == ()


def test_a_list_of_shapes_is_bounded():
    with pytest.raises(InputError):
        of_sections({"model": {"shapes": ["sdxl-64"] * 1000}})
