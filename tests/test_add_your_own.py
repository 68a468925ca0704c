"""A kernel, a strategy and a mask of a user's own: one file and one row each, and no file of
maxattn is edited. The strategy and the mask are those of docs/architecture.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.config import schema
from maxattn.context_parallel import STRATEGIES
from maxattn.context_parallel import table as strategies
from maxattn.errors import ConfigError, Unsupported
from maxattn.kernels import KERNELS
from maxattn.kernels import table as kernels
from tests.cases import compare
from tests.pages import blocks
from tests.reference import attention64

KERNEL = '''
"""Attention from all scores at once, in float32."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from maxattn.call import Reason
from maxattn.kernels.base import Grads, Kernel, Lines, Result


@dataclass(frozen=True)
class Plain(Kernel):
    name: ClassVar[str] = "plain"
    scale: float

    @staticmethod
    def supports(call, target):
        if call.bias is None and call.heads == call.kv_heads:
            return None
        rule = "it takes no bias and no shared key heads"
        return Reason("plain", "call", rule, "set attention: auto")

    @staticmethod
    def build(call, config, target):
        return Plain(call.scale)

    def lines(self, call):
        return Lines("plain (jax.numpy)", "none: all scores at once")

    def forward(self, inputs):
        lse = jax.nn.logsumexp(self.scores(inputs), axis=-1)
        return Result(jnp.einsum("bnts,bsnh->btnh", self.probabilities(inputs, lse), inputs.v), lse)

    def backward(self, inputs, rows):
        p = self.probabilities(inputs, rows.lse)
        delta = jnp.einsum("btnh,btnh->bnt", rows.out, rows.dout) - rows.dlse
        dp = jnp.einsum("btnh,bsnh->bnts", rows.dout, inputs.v)
        ds = self.scale * p * (dp - delta[..., None])
        return Grads(
            dq=jnp.einsum("bnts,bsnh->btnh", ds, inputs.k),
            dk=jnp.einsum("bnts,btnh->bsnh", ds, inputs.q),
            dv=jnp.einsum("bnts,btnh->bsnh", p, rows.dout),
        )

    def probabilities(self, inputs, lse):
        s = self.scores(inputs)
        return jnp.where(s > -jnp.inf, jnp.exp(s - lse[..., None]), 0)

    def scores(self, inputs):
        queries, keys = jnp.arange(inputs.q.shape[1]), jnp.arange(inputs.k.shape[1])
        seen = inputs.mask.allowed(queries, keys, inputs.q_offset, inputs.kv_offset)
        s = self.scale * jnp.einsum("btnh,bsnh->bnts", inputs.q, inputs.k)
        return jnp.where(seen, s, -jnp.inf)
'''

LENGTH, HEADS, WIDTH, REACH, SINK = 64, 4, 16, 8, 4


def shown() -> str:
    """Return a kernel's imports, a mask and a strategy from docs/architecture.md."""
    page = [x.text for x in blocks("docs/architecture.md") if x.language == "python"]
    wanted = ("class Mine(", "class WindowWithSink(", "class Gather(")
    return "\n".join(text for text in page if any(word in text for word in wanted))


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put two files into a folder on Python's path, and add the two rows."""
    files = {"my_kernel": KERNEL, "my_parts": shown()}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    kernels.add(kernels.KernelRow("plain", "my_kernel:Plain"))
    strategies.add(strategies.StrategyRow("gather", "my_parts:Gather", in_attention=True))
    yield tmp_path
    kernels.remove("plain")
    strategies.remove("gather")
    for name in files:
        sys.modules.pop(name, None)


def from_yaml(folder: Path, text: str) -> ma.AttentionConfig:
    path = folder / "attention.yml"
    path.write_text(text, encoding="utf-8")
    return ma.AttentionConfig.from_yaml(path)


def window() -> Any:
    return import_module("my_parts").WindowWithSink(REACH, SINK)


def seen() -> np.ndarray:
    at = np.arange(LENGTH)
    return (abs(at[:, None] - at) <= REACH) | (at < SINK)


def arrays() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shape = (2, LENGTH, HEADS, WIDTH)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(4))


def check(config: ma.AttentionConfig, mesh: Any, masked: bool = True) -> None:
    """Compare output and gradients with float64."""
    *qkv, dout = arrays()
    mask, allowed = (window(), seen()) if masked else (None, None)

    def out(*qkv: jax.Array) -> jax.Array:
        return ma.attention(*qkv, mask=mask, config=config, mesh=mesh)

    got, pull = jax.vjp(jax.jit(out), *qkv)
    want = attention64(*qkv, allowed=allowed, dout=dout)
    compare((got, None, *pull(dout)), want)


@pytest.mark.parametrize("masked", [True, False])
def test_a_kernel_on_one_device(added: Path, masked: bool) -> None:
    config = from_yaml(added, "attention: plain\n")
    plan = ma.plan(ma.Call.of(*arrays()[:2], mask=window()), config)
    assert plan.kernel.name == "plain" and "runs    plain (jax.numpy)" in plan.explain()
    check(config, None, masked)


MESH = "ici_data_parallelism: 2\nici_context_parallelism: 4\n"


ON_MESHES = [
    "attention: plain\ncontext_parallel: gather\n",
    "attention: gather\nattention_kernel: plain\n",
    "attention: dot_product\ncontext_parallel: gather\n",
    "attention: plain\ncontext_parallel: ring\n",
    "attention: plain\ncontext_parallel: ulysses\n",
]


@pytest.mark.parametrize("settings", ON_MESHES)
def test_a_kernel_and_a_strategy_on_a_mesh(added: Path, settings: str) -> None:
    config = from_yaml(added, settings + MESH)
    mesh = config.make_mesh()
    assert mesh.size == 8
    plan = ma.plan(ma.Call.of(*arrays()[:2], mask=window()), config, mesh)
    assert plan.kernel.name == config.kernel_for("self")
    assert plan.strategy.name == config.strategy_for("self")
    if plan.strategy.name == "gather":
        assert "gather over 4" in plan.explain() and "all_gather over context" in plan.explain()
    check(config, mesh)


def test_a_mask_runs_in_every_kernel(added: Path) -> None:
    for name in ("dot_product", "flash"):
        check(from_yaml(added, f"attention: {name}\n"), None)
    assert window().show(16, 16)


def test_its_refusal_reaches_the_user(added: Path) -> None:
    q, k = (jax.ShapeDtypeStruct((1, LENGTH, n, WIDTH), "float32") for n in (4, 2))
    with pytest.raises(Unsupported, match="no shared key heads"):
        ma.plan(ma.Call.of(q, k), from_yaml(added, "attention: plain\n"))


def test_its_name_is_valid_while_its_row_is_there(added: Path) -> None:
    enum = json.loads(schema.text())["properties"]["attention"]["enum"]
    assert {"plain", "gather"} <= set(enum)
    for text, name in (("attention: plian", "plain"), ("context_parallel: gater", "gather")):
        with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
            from_yaml(added, text)
    with pytest.raises(ConfigError, match="another kernel has this name"):
        kernels.add(kernels.KernelRow("plain", "elsewhere:Plain"))


def test_without_the_rows_the_names_are_unknown() -> None:
    for settings in ({"attention": "plain"}, {"context_parallel": "gather"}):
        with pytest.raises(ConfigError, match="one of"):
            ma.AttentionConfig(**settings)


def test_every_row_names_a_class_of_its_name() -> None:
    for classes in (KERNELS, STRATEGIES):
        assert all(cls.name == name for name, cls in classes.items())
