"""Attention shapes of known models, by name, and how a user writes one: B,T,S,N,H[,K]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from maxattn.call import Call, Role
from maxattn.errors import InputError, did_you_mean
from maxattn.masks import BlockSlidingWindow, Full, Mask

FULL = Full()
DTYPE_OF = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
DTYPE_OF |= {name: name for name in DTYPE_OF.values()}


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of one attention, with what it belongs to.

    Args:
        name: for the command line; what the user wrote for a shape without a name.
        batch, q_len, kv_len, heads, head_dim: B, T, S, N, H.
        kv_heads: K; 0 for N.
        role: "self" or "cross".
        mask: which query sees which key.
        dtype: of q, k and v.
        what: one line about it.
    """

    name: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    head_dim: int
    kv_heads: int = 0
    role: Role = "self"
    mask: Mask = FULL
    dtype: str = "bfloat16"
    what: str = ""

    def call(self) -> Call:
        """Describe it as a call."""
        mask = self.mask.bind(self.q_len, self.kv_len, self.batch, self.heads).form()
        heads = self.heads, self.kv_heads or self.heads, self.head_dim
        sizes = self.batch, self.q_len, self.kv_len, *heads
        return Call(*sizes, self.dtype, mask, role=self.role)


def _self(
    name: str, batch: int, tokens: int, heads: int, head_dim: int, what: str, mask: Mask = FULL
) -> Shape:
    return Shape(name, batch, tokens, tokens, heads, head_dim, mask=mask, what=what)


def _cross(
    name: str, batch: int, q_len: int, kv_len: int, heads: int, head_dim: int, what: str
) -> Shape:
    return Shape(name, batch, q_len, kv_len, heads, head_dim, role="cross", what=what)


_EACH_SEES_7 = BlockSlidingWindow(1560, 7)
_EACH_SEES_16 = BlockSlidingWindow(256, 16)
_ALL = (
    _self("wan-1.3b-480p", 1, 32760, 12, 128, "Wan 1.3B, 81 frames of 832x480"),
    _self("wan-1.3b-720p", 1, 75600, 12, 128, "Wan 1.3B, 81 frames of 1280x720"),
    _self("wan-14b-480p", 1, 32760, 40, 128, "Wan 14B, 81 frames of 832x480"),
    _self("wan-14b-720p", 1, 75600, 40, 128, "Wan 14B, 81 frames of 1280x720"),
    _cross("wan-cross", 1, 32760, 512, 12, 128, "Wan 1.3B 480p, to 512 text tokens"),
    _cross("wan-14b-cross", 1, 75600, 512, 40, 128, "Wan 14B 720p, to 512 text tokens"),
    _cross("wan-i2v-cross", 1, 75600, 257, 40, 128,
           "Wan 14B 720p, to the image's 257 tokens, beside the text"),
    _self("sdxl-64", 16, 4096, 10, 64, "SDXL at 1024x1024, the 64x64 level"),
    _self("sdxl-32", 16, 1024, 20, 64, "SDXL at 1024x1024, the 32x32 level"),
    _cross("sdxl-cross", 16, 4096, 77, 10, 64, "SDXL 64x64, to 77 text tokens"),
    _cross("sdxl-32-cross", 16, 1024, 77, 20, 64, "SDXL 32x32, to 77 text tokens"),
    _self("flux-1024", 2, 4608, 24, 128,
          "Flux at 1024x1024: 4,096 image and 512 text tokens together"),
    _self("swba-1560x7", 1, 32760, 12, 128,
          "21 frames of 1,560 tokens, each sees 7", _EACH_SEES_7),
    _self("swba-256x16", 1, 32768, 12, 64,
          "128 blocks of 256 tokens, each sees 16", _EACH_SEES_16),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _ALL}


def read(text: str) -> Shape:
    """Read a shape as a user writes it: a name of `SHAPES`, or B,T,S,N,H[,K].

    It is self-attention where T = S.

    Raises:
        InputError: for what is neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    b, t, s, n, h, *k = _numbers(text)
    if k and n % k[0]:
        rule = f"K divides N, and {k[0]} does not divide {n}"
        divisors = ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
        raise InputError("shape", text, rule, f"give a K of {divisors}")
    return Shape(text, b, t, s, n, h, *k, role="self" if t == s else "cross")


def _numbers(text: str) -> list[int]:
    words = [part.strip() for part in text.split(",")]
    if len(words) in (5, 6) and all(word.isdecimal() and int(word) > 0 for word in words):
        return list(map(int, words))
    rule = f"it is B,T,S,N,H[,K] in whole numbers, or one of {', '.join(SHAPES)}"
    remedy = did_you_mean(text, SHAPES) or "write for example 1,32760,32760,12,128"
    raise InputError("shape", text or "(nothing)", rule, remedy)


def changed(
    shape: Shape, role: Role | None, dtype: str | None, mask: Mask | None, batch: int | None
) -> Shape:
    """Return a shape with what the user said otherwise; None leaves it.

    Raises:
        InputError: for a dtype that is not known.
    """
    if dtype is not None and dtype not in DTYPE_OF:
        raise InputError("dtype", dtype, f"it is one of {', '.join(DTYPE_OF)}", "write bf16")
    given = {"role": role, "dtype": DTYPE_OF.get(dtype or ""), "mask": mask, "batch": batch}
    return replace(shape, **{key: value for key, value in given.items() if value is not None})


# ---- the sections of a program's file ------------------------------------------------------------


def of_sections(sections: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Find the shapes that a file's own sections describe; none where they do not say enough.

    `model.shapes` is a list of names or B,T,S,N,H[,K]. Else `model.heads` and `model.dim_head` with
    the tokens: `model.tokens`, or the patches of `model.patch` in `data.frames`, `data.height` and
    `data.width` (or `data.canvas` for both). `training.batch_size` is B, else 1;
    `model.text_tokens` adds cross-attention.

    Args:
        sections: the file's values, overrides applied.

    Raises:
        InputError: for a name in `model.shapes` that is not known.
    """
    model = _section(sections, "model")
    if isinstance(model.get("shapes"), list):
        return tuple(read(str(text)) for text in model["shapes"])
    heads, head_dim = model.get("heads"), model.get("dim_head")
    tokens = model.get("tokens") or _patches(model, _section(sections, "data"))
    if not all(isinstance(n, int) and n > 0 for n in (heads, head_dim, tokens)):
        return ()
    batch = _section(sections, "training").get("batch_size", 1)
    found = [Shape("model", batch, tokens, tokens, heads, head_dim, what="the file's model")]  # type: ignore[arg-type]
    if isinstance(text := model.get("text_tokens"), int):
        found.append(replace(found[0], name="model-cross", kv_len=text, role="cross"))
    return tuple(found)


def _section(sections: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return section if isinstance(section := sections.get(name), Mapping) else {}


def _patches(model: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """Count the patches of a clip, 0 where the sizes are not there."""
    canvas, patch = data.get("canvas"), model.get("patch")
    sides = (data.get("frames"), data.get("height", canvas), data.get("width", canvas))
    if not isinstance(patch, list):
        return 0
    if not all(isinstance(n, int) and n > 0 for n in (*sides, *patch)):
        return 0
    return prod(side // size for side, size in zip(sides, patch, strict=False))  # type: ignore[operator]
