"""A call binds its mask once and checks its operands once: `attention()` and every module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import call as calls
from maxattn import masks as M
from maxattn.errors import InputError

CONFIG = ma.AttentionConfig(attention="dot_product")
SIZES: dict[str, Any] = {"heads": 2, "dim_head": 8, "config": CONFIG, "rngs": nnx.Rngs(0)}
X, TEXT, HEADS = np.ones((2, 6, 16), "f"), np.ones((2, 6, 16), "f"), np.ones((2, 6, 2, 8), "f")
SELF, CROSS = ma.FlaxAttention(16, **SIZES), ma.CrossAttention(16, **SIZES)
JOINT, KV = ma.JointAttention(16, **SIZES), CROSS.compute_kv(jnp.asarray(TEXT))
MASK, LONGER = M.Dense(np.ones((6, 6), bool)), M.Dense(np.ones((12, 12), bool))

CALLS: dict[str, Callable[[M.Dense], Any]] = {
    "attention": lambda mask: ma.attention(*map(jnp.asarray, [HEADS] * 3), mask, config=CONFIG),
    "self": lambda mask: SELF(X, mask=mask),
    "cross": lambda mask: CROSS(X, TEXT, mask=mask),
    "cross with kv": lambda mask: CROSS(X, kv=KV, mask=mask),
    "joint": lambda mask: JOINT(X, TEXT, mask=mask),
    "nnx": lambda mask: nnx.MultiHeadAttention(
        2, 16, attention_fn=ma.attention_fn(CONFIG), decode=False, rngs=nnx.Rngs(0)
    )(X, mask=mask.table),
}


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, found: Counter) -> None:
    plain = getattr(owner, name)

    def one_more(*args: Any, **kwargs: Any) -> Any:
        found[name] += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, one_more)


@pytest.mark.parametrize("name", CALLS)
def test_one_bind_and_one_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, found = LONGER if name == "joint" else MASK, Counter()
    counted(monkeypatch, M.Dense, "bind", found)
    counted(monkeypatch, calls, "check_operands", found)
    CALLS[name](mask)
    assert found == {"bind": 1, "check_operands": 1}
    CALLS[name](mask)
    assert found == {"bind": 2, "check_operands": 2}


def test_operands_of_several_dtypes_are_refused_by_modules_too() -> None:
    half = ma.CrossAttention(16, dtype=jnp.bfloat16, **SIZES)
    with pytest.raises(InputError, match="one dtype"):
        half(X, kv=KV)


def test_keys_and_values_of_two_lengths_are_refused_before_anything_is_projected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nnx.Linear, "__call__", lambda *_: 1 / 0)
    with pytest.raises(InputError, match="tokens and heads of v must be those of k"):
        CROSS(X, kv=KV._replace(v=KV.v[:, :5]))
