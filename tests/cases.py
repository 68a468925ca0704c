"""The axes of the matrix (masks, lengths, heads, dtypes), and helpers that run and judge a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks as M
from tests.reference import Answer, attention64, error

# Largest error relative to the largest entry, by dtype: output and gradients round to it, operands
# of matmuls too.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}

LENGTHS = {
    "64": (64, 64), "odd": (37, 37), "one": (1, 33), "cross": (45, 130), "short": (129, 77),
    "prime": (131, 131),
}  # fmt: skip
HEADS = {
    "mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1), "8 of 8": (8, 8), "8 of 2": (8, 2),
    "8 of 1": (8, 1),
}  # fmt: skip


def _rng(b: int, t: int, s: int) -> np.random.Generator:
    return np.random.default_rng(1000 * b + 10 * t + s)


def _lengths(b: int, t: int, s: int) -> np.ndarray:
    return _rng(b, t, s).integers(1, s + 1, b).astype(np.int32)


def _flags(b: int, t: int, s: int) -> np.ndarray:
    return _rng(b, t, s).random((b, s)) < 0.7


def _segments(b: int, t: int, s: int) -> M.Mask:
    rng = _rng(b, t, s)
    return M.Segments(*(np.sort(rng.integers(-1, 3, (b, n)), 1).astype(np.int32) for n in (t, s)))


def _packed(t: int, s: int) -> M.Mask:
    """Four segments with static lengths; some may have no query, or no key."""
    rng = _rng(1, t, s)
    ends = [[0, *np.sort(rng.integers(0, n + 1, 3)), n] for n in (t, s)]
    return M.Segments.of_lengths(*map(np.diff, ends))


def _table(b: int, n: int, t: int, s: int) -> np.ndarray:
    return _rng(b, t, s).random((b, n, t, s)) < 0.5


def _video(b: int, t: int, s: int) -> M.Mask:
    first = {"first_frame_alone": True, "offset": max(0, s - t)}
    return M.VideoMask(-(-s // 4), 4, 2, window=3, sink=1, **first)


MaskMaker = Callable[[int, int, int, int], M.Mask | None]
# (b, n, t, s) -> mask. "first rows empty" hides every key from some rows.
MASKS: dict[str, MaskMaker] = {
    "full": lambda b, n, t, s: None,
    "causal": lambda b, n, t, s: M.Causal(offset=s - t if t <= s else 0),
    "window": lambda b, n, t, s: M.LocalWindow(7, 3, offset=max(0, s - t)),
    "block window": lambda b, n, t, s: M.BlockSlidingWindow(11, 2, offset=max(0, s - t)),
    "block causal": lambda b, n, t, s: M.BlockCausal(9, offset=max(0, s - t)),
    "video": lambda b, n, t, s: (
        _video(b, t, s) if s % 4 == 0 else M.BlockCausal(4, offset=max(0, s - t))
    ),
    "lengths": lambda b, n, t, s: M.KeyPadding(_lengths(b, t, s)),
    "flags": lambda b, n, t, s: M.KeyPadding(_flags(b, t, s)),
    "segments": lambda b, n, t, s: _segments(b, t, s),
    "packed": lambda b, n, t, s: _packed(t, s),
    "dense": lambda b, n, t, s: M.Dense(_table(1, 1, t, s)),
    "dense heads": lambda b, n, t, s: M.Dense(_table(b, n, t, s)),
    "causal & lengths": lambda b, n, t, s: (
        M.Causal(max(0, s - t)) & M.KeyPadding(_lengths(b, t, s))
    ),
    "window | sink": lambda b, n, t, s: M.LocalWindow(5, 5, offset=max(0, s - t)) | M.KeyLimit(3),
    "not segments": lambda b, n, t, s: ~_segments(b, t, s) & M.Causal(offset=max(0, s - t)),
    "rows empty": lambda b, n, t, s: ~M.Causal(offset=max(0, s - t)) & M.KeyLimit(max(1, s // 2)),
    "nothing": lambda b, n, t, s: M.KeyPadding(np.zeros(b, np.int32)),
}
# One mask of each kind: everything, one interval that moves, one in steps, arrays of lengths and of
# ids, a table, and a complement. What is not the code of masks meets these in `make test`.
KINDS = ("full", "causal", "block window", "lengths", "segments", "dense heads", "not segments")
# The kernels that XLA compiles, in several chunks at lengths of ten tokens.
XLA_KERNELS = {
    "dense": ma.AttentionConfig(attention="dot_product"),
    "blockwise": ma.AttentionConfig(
        attention="dot_product", use_memory_efficient_attention=True, query_chunk_size=5,
        key_chunk_size=4,
    ),
}  # fmt: skip
# "far": -1e9 on the first half of the keys, which are all that some rows of a mask may see.
BIASES = {"none": None, "full": "BNTS", "shared": "11TS", "keys": "B11S", "far": "B11S"}


def arrays(case: dict) -> dict[str, Any]:
    """Draw the operands of a case in numpy; putting these on a mesh needs no program."""
    (t, s), (n, k) = LENGTHS[case["length"]], HEADS[case["heads"]]
    b, h, dtype = case["batch"], case["head_dim"], case["dtype"]
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    letters = BIASES.get(case["bias"], case["bias"])  # a case may give the axes themselves
    sizes = {"B": b, "N": n, "T": t, "S": s, "1": 1}
    shape = tuple(sizes[c] for c in letters) if letters else None
    operands = {"q": normal(b, t, n, h), "k": normal(b, s, k, h), "v": normal(b, s, k, h)}
    bias_dtype = jnp.dtype(case.get("bias_dtype", "float32"))
    bias = rng.normal(size=shape).astype(bias_dtype) if shape else None
    if bias is not None and case["bias"] == "far":
        bias[..., : s // 2] = -1e9
    return operands | {
        "bias": bias,
        "mask": MASKS[case["mask"]](b, n, t, s),
        "dout": normal(b, t, n, h), "dlse": rng.normal(size=(b, n, t)).astype(np.float32),
    }  # fmt: skip


def allowed(mask: M.Mask | None, t: int, s: int) -> np.ndarray | None:
    """Evaluate a mask densely; tests/masks compares the result with the mask's definition."""
    return None if mask is None else np.asarray(mask.bind(t, s).allowed(np.arange(t), np.arange(s)))


def run_case(
    case: dict,
    config: ma.AttentionConfig,
    mesh: Any = None,
    role: str = "self",
    compiler_options: Any = None,
    measure: Callable[[Any, Any], float] = error,
) -> dict[str, float]:
    """Run forward and backward of a case; return the error of each result against float64."""
    x = arrays(case)
    t, s = x["q"].shape[1], x["k"].shape[1]
    ok = allowed(x["mask"], t, s)
    seen = np.ones((1, 1, t), bool) if ok is None else ok.any(-1)
    # The LSE of a query with nothing to attend to is -inf, and a cotangent for it means nothing.
    dlse = np.where(seen, x["dlse"], np.float32(0))
    settings = {"config": config, "mesh": mesh, "role": role, "return_lse": True}
    call = partial(ma.attention, mask=x["mask"], **settings)

    attend = partial(both, lambda q, k, v, bias: call(q, k, v, bias=bias), x | {"dlse": dlse})
    run = jax.jit(attend, compiler_options=compiler_options)
    got = run(x["q"], x["k"], x["v"], x["bias"])
    want = attention64(x["q"], x["k"], x["v"], ok, x["bias"], dout=x["dout"], dlse=dlse)
    return {n: measure(g, w) for n, g, w in zip(RESULTS, got, want, strict=True) if w is not None}


RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias")


def both(call: Callable[..., Any], x: dict[str, Any], *operands: Any) -> tuple[Any, ...]:
    """Return out and LSE of a call, and the operands' gradients for `x["dout"]`, `x["dlse"]`."""
    (out, lse), pull = jax.vjp(call, *operands)
    return out, lse, *pull((x["dout"], x["dlse"]))


def compare(got: Iterable[Any], want: Answer, within: float = TOLERANCE["float32"]) -> None:
    """Return errors against float64, relative to the largest entry; `got` may have more results."""
    pairs = zip(RESULTS, got, want, strict=False)
    found = {n: error(g, w) for n, g, w in pairs if g is not None and w is not None}
    assert max(found.values()) < within, found


def draw_operands(b: int, t: int, s: int, n: int, k: int, h: int, v: int = 0) -> dict[str, Any]:
    """Draw float32 operands of a call, and cotangents."""
    rng, v = np.random.default_rng(0), v or h
    sizes = {"q": (t, n, h), "k": (s, k, h), "v": (s, k, v), "dout": (t, n, v), "dlse": (n, t)}
    return {key: rng.normal(size=(b, *size)).astype(np.float32) for key, size in sizes.items()}


def judge_call(attend: Any, x: dict[str, Any], mask: M.Mask | None, within: float = 2e-5) -> None:
    """Compare both passes of `attend(q, k, v)`, which returns out and LSE, with float64."""
    operands = x["q"], x["k"], x["v"]
    ok = allowed(mask, x["q"].shape[1], x["k"].shape[1])
    want = attention64(*operands, ok, dout=x["dout"], dlse=x["dlse"])
    compare(jax.jit(partial(both, attend, x))(*operands), want, within)


def judge(case: dict, errors: dict[str, float]) -> None:
    """Fail, naming the case, if any error is above the tolerance of its dtype."""
    over = {n: e for n, e in errors.items() if e > TOLERANCE[case["dtype"]]}
    assert not over, f"{case}: {over}, tolerance {TOLERANCE[case['dtype']]}"
