"""Attention shapes of known models, and a reader of shapes written as B,T,S,N,H[/V][,K]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from maxattn.call import Call, Role
from maxattn.config.errors import plain
from maxattn.config.numbers import LARGEST, divisors, whole, whole_in
from maxattn.errors import InputError, did_you_mean
from maxattn.masks import BlockSlidingWindow, Full, Mask
from maxattn.tools.known_models import KNOWN_SHAPES

FULL = Full()
MOST_SHAPES = 256  # most shapes that a file may list, since each shape is planned
DTYPE_OF = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
DTYPE_OF |= {name: name for name in DTYPE_OF.values()} | {"fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Shape:
    """The sizes of one attention, with its role, mask and dtype."""

    name: str  # a name of `SHAPES`, or the shape as the user wrote it
    # batch, q_len, kv_len, heads, head_dim: B, T, S, N, H
    batch: int
    q_len: int
    kv_len: int
    heads: int
    head_dim: int
    kv_heads: int = 0  # K; 0 if K equals N
    role: Role = "self"  # "self" or "cross"
    mask: Mask = FULL  # which query sees which key
    dtype: str = "bfloat16"  # dtype of q, k and v
    value_dim: int = 0  # V, the head dim of values, if it differs from H; else 0

    def call(self) -> Call:
        """Return the `Call` of this shape."""
        mask = self.mask.bind(self.q_len, self.kv_len, self.batch, self.heads).form()
        heads = self.heads, self.kv_heads or self.heads, self.head_dim
        sizes = self.batch, self.q_len, self.kv_len, *heads
        values = 0 if self.value_dim == self.head_dim else self.value_dim
        return Call(*sizes, self.dtype, mask, role=self.role, value_head_dim=values)

    @property
    def operations(self) -> float:
        """FLOPs of a forward over the query-key pairs that the mask allows."""
        pairs = self.mask.bind(self.q_len, self.kv_len).allowed_pairs(self.q_len, self.kv_len)
        channels = self.head_dim + (self.value_dim or self.head_dim)
        return 2.0 * self.batch * self.heads * channels * pairs


SHAPES = {
    name: Shape(name, *sizes, role=role, mask=BlockSlidingWindow(*window) if window else FULL)
    for name, (*sizes, role, window) in KNOWN_SHAPES.items()
}


def read(text: str) -> Shape:
    """Read a shape: a name of `SHAPES`, or B,T,S,N,H[/V][,K] (self-attention if T = S)."""
    if text in SHAPES:
        return SHAPES[text]
    words = text.split(",", 6)
    head_dim, has_values, values = (words[4] if len(words) > 4 else "").partition("/")
    words[4:5] = [head_dim, *([values] if has_values else [])]
    numbers = [number for word in words if (number := whole_in(word))]
    if len(numbers) != len(words) or len(numbers) - bool(has_values) not in (5, 6):
        form = "it must be B,T,S,N,H[/V][,K]: batch, queries, keys, heads and head dim"
        given, wrong = text.count(",") + 1, [word for word in words if not whole_in(word)]
        if given == 1:
            rule = f"{form}, or one of {', '.join(SHAPES)}"
        elif given not in (5, 6):
            rule = f"{form}, five numbers or six with the key heads, and {given} are given"
        else:
            rule = f"{form}, whole numbers up to {LARGEST}, and {plain(wrong[0])} is none"
        remedy = did_you_mean(text, SHAPES) or "write for example 1,32760,32760,12,128"
        raise InputError("shape", plain(text) if text else "(nothing)", rule, remedy)
    value_dim = numbers.pop(5) if has_values else 0
    _, t, s, n, _, *k = numbers
    if k and n % k[0]:
        rule = f"K must divide N, and {k[0]} does not divide {n}"
        choices = ", ".join(map(str, divisors(n)))
        raise InputError("shape", text, rule, f"write one of {choices} for K")
    return Shape(text, *numbers, role="self" if t == s else "cross", value_dim=value_dim)


def dtype_of(text: str) -> str:
    """Return the full name of a dtype, such as bfloat16 for bf16."""
    if text not in DTYPE_OF:
        raise InputError("dtype", text, f"it must be one of {', '.join(DTYPE_OF)}", "write bf16")
    return DTYPE_OF[text]


def changed(
    shape: Shape, role: Role | None, dtype: str | None, mask: Mask | None, batch: int | None
) -> Shape:
    """Return a shape with the given values; None leaves a value unchanged."""
    given = {"role": role, "dtype": dtype and dtype_of(dtype), "mask": mask, "batch": batch}
    return replace(shape, **{key: value for key, value in given.items() if value is not None})


# ---- the sections of a program's file ------------------------------------------------------------


def of_sections(sections: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Return the shapes that a file's sections describe; none if they describe no shape.

    `model.shapes` is a list of names or B,T,S,N,H[/V][,K]. Without it, N is `model.heads`, H is
    `model.dim_head`, and T = S is `model.tokens`, or the number of patches of size `model.patch` in
    a clip of `data.frames`, `data.height` and `data.width` (`data.canvas` stands for a missing
    height or width). B is `training.batch_size`, default 1. `model.text_tokens` adds a
    cross-attention with that many keys.

    Raises:
        InputError: `model.shapes` has an unknown name, or a size is no whole number above 0.
    """
    model, data, training = (_section(sections, name) for name in ("model", "data", "training"))
    if isinstance(listed := model.get("shapes"), list):
        if len(listed) > MOST_SHAPES:
            rule = f"at most {MOST_SHAPES} shapes may be listed"
            value = f"{len(listed)} shapes"
            raise InputError("model.shapes", value, rule, "list fewer shapes")
        return tuple(read(str(text)) for text in listed)
    sizes = [("model.heads", model.get("heads")), ("model.dim_head", model.get("dim_head"))]
    of_tokens = _token_sizes(model, data)
    # A list or a mapping is a setting of the program's own, not a size.
    values = [value for _, value in (*sizes, *of_tokens)]
    if not of_tokens or any(v is None or isinstance(v, list | tuple | Mapping) for v in values):
        return ()
    heads, head_dim = (_size(*size) for size in sizes)
    tokens = _tokens([_size(*size) for size in of_tokens])
    given = training.get("batch_size")
    batch = 1 if given is None else _size("training.batch_size", given)
    found = Shape("model", batch, tokens, tokens, heads, head_dim)
    if (text_tokens := model.get("text_tokens")) is None:
        return (found,)
    kv_len = _size("model.text_tokens", text_tokens)
    return found, replace(found, name="model-cross", kv_len=kv_len, role="cross")


def _section(sections: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return section if isinstance(section := sections.get(name), Mapping) else {}


def _token_sizes(model: Mapping[str, Any], data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List the keys, with values, that give the tokens: `model.tokens`, or clip and patch sizes."""
    if model.get("tokens") is not None:
        return [("model.tokens", model["tokens"])]
    patch = model.get("patch")
    if not isinstance(patch, list):
        return []
    keys = ("frames", *(key if key in data else "canvas" for key in ("height", "width")))
    sides = [(f"data.{key}", data.get(key)) for key in keys]
    if len(patch) != len(sides):
        rule = "a patch has three sizes: frames, rows and columns"
        raise InputError("model.patch", plain(patch), rule, "write for example [1, 2, 2]")
    return [*sides, *((f"model.patch[{i}]", size) for i, size in enumerate(patch))]


def _tokens(sizes: list[int]) -> int:
    if len(sizes) == 1:
        return sizes[0]
    tokens = prod(side // size for side, size in zip(sizes[:3], sizes[3:], strict=True))
    if whole(tokens) is None:
        rule = f"a clip must have 1 to {LARGEST} patches"
        remedy = "correct model.patch, or the sizes in data"
        raise InputError("model.patch", f"{plain(tokens)} patches", rule, remedy)
    return tokens


def _size(key: str, value: Any) -> int:
    if (size := whole(value)) is not None:
        return size
    rule = f"it must be a whole number from 1 to {LARGEST}: attention's shape is read from it"
    remedy = "write a whole number, or give shapes with --shape"
    raise InputError(key, plain(value), rule, remedy)
