"""A call binds its mask and checks its operands only once, in `attention()` and in modules."""

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

CONFIG = ma.AttentionConfig(attention="dot_product")
SIZES: dict[str, Any] = {"heads": 2, "dim_head": 8, "config": CONFIG, "rngs": nnx.Rngs(0)}
X, HEADS = np.ones((2, 6, 16), "f"), jnp.ones((2, 6, 2, 8))
CROSS = ma.CrossAttention(16, **SIZES)
MASK, LONGER = M.Dense(np.ones((6, 6), bool)), M.Dense(np.ones((12, 12), bool))

CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: ma.attention(HEADS, HEADS, HEADS, MASK, config=CONFIG),
    "self": lambda: ma.FlaxAttention(16, **SIZES)(X, mask=MASK),
    "cross": lambda: CROSS(X, X, mask=MASK),
    "cross with kv": lambda: CROSS(X, kv=CROSS.compute_kv(jnp.asarray(X)), mask=MASK),
    "joint": lambda: ma.JointAttention(16, **SIZES)(X, X, mask=LONGER),
    "nnx": lambda: ma.attention_fn(CONFIG)(HEADS, HEADS, HEADS, mask=MASK.table),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_bind_and_one_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[str] = Counter()

    def counted(owner: Any, method: str) -> None:
        plain = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *of: (found.update([method]), plain(*of))[1])

    counted(M.Dense, "bind")
    counted(calls, "check_operands")
    CALLS[name]()
    assert found == {"bind": 1, "check_operands": 1}
