"""Named shapes, shapes as a user writes them, and those of a program's sections."""

from __future__ import annotations

import pytest

from maxattn.errors import InputError
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


@pytest.mark.parametrize("name", SHAPES)
def test_every_name_is_a_call(name):
    call = read(name).call()
    assert call.dtype == "bfloat16" and call.heads == call.kv_heads
    assert (call.role == "cross") == (call.q_len != call.kv_len)
    assert call.mask.is_full == (not name.startswith("swba"))


def test_numbers():
    shape = read("2,64,77,8,32,4")
    assert (shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.head_dim) == (
        2,
        64,
        77,
        8,
        32,
    )
    assert (shape.role, shape.call().kv_heads) == ("cross", 4)
    assert read("2,64,64,8,32").role == "self"


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "1,2,3,4,5,6,7", "0,1,1,1,1", "1,a,1,1,1", "-1,2,2,2,2", "1,8,8,4,8,3"]
)
def test_what_is_no_shape(text):
    with pytest.raises(InputError):
        read(text)


def test_sections():
    model = {"heads": 4, "dim_head": 24, "patch": [1, 6, 6]}
    found = of_sections(
        {"model": model, "data": {"frames": 5, "canvas": 12}, "training": {"batch_size": 64}}
    )
    assert [(s.batch, s.q_len, s.heads, s.head_dim, s.role) for s in found] == [
        (64, 20, 4, 24, "self")
    ]
    found = of_sections({"model": {"heads": 2, "dim_head": 8, "tokens": 100, "text_tokens": 7}})
    assert [(s.batch, s.q_len, s.kv_len, s.role) for s in found] == [
        (1, 100, 100, "self"),
        (1, 100, 7, "cross"),
    ]
    assert [s.name for s in of_sections({"model": {"shapes": ["wan-cross", "sdxl-64"]}})] == [
        "wan-cross",
        "sdxl-64",
    ]
    for little in (
        {},
        {"model": None},
        {"model": {"heads": 2}},
        {"model": {"heads": 2, "dim_head": 8, "patch": 3}},
    ):
        assert of_sections(little) == ()
