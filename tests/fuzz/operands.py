"""Drawn operands of attention as Python: q, k, v, dout, dlse, bias, and odd values in them."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import NamedTuple

from tests.fuzz.case import Machine
from tests.fuzz.masks import Leaf, Node, Sizes, Tree, draw_tree

LENGTHS = (1, 2, 3, 7, 8, 16, 17, 31, 32, 40, 64, 65, 100, 127, 128, 129, 130)
HEAD_DIMS = (1, 2, 7, 8, 16, 16, 32, 33, 64, 64, 80, 96, 128, 130)
HEADS = ((1, 1), (2, 2), (2, 1), (4, 2), (3, 3), (6, 2), (4, 4))
VALUES = ("normal", "normal", "normal", "normal", "large", "ties", "small", "ones")
# Of float16: from its least numbers to its largest. They are drawn when the text is written.
EDGES = (1e-7, 1e-4, 1.0, 200.0, 2e4)
# Of q, k, v and dout, if float16 holds the scores, and the gradients with all their digits.
EDGE_FACTORS = tuple(
    (q, k, v, dout)
    for q, k, v, dout in product(EDGES, repeat=4)
    if q * k <= EDGES[-1] and v * dout * min(q, k) >= 1e-3 and v * dout * max(q, k) <= EDGES[-1]
)
LARGEST = {"float32": 30.0, "bfloat16": 30.0, "float16": 8.0}


class Operands(NamedTuple):
    """The operands of a call, and how their arrays are drawn."""

    sizes: Sizes
    dtype: str
    values: str
    tree: Tree | None  # the mask
    bias: tuple[int, ...] | None  # its shape
    bias_kind: str
    bias_dtype: str
    hidden: str  # "nan" or "inf" in keys that no query may attend to, or ""
    scale: float | None
    seed: int

    def text(self) -> str:
        """Format the operands as Python."""
        s = self.sizes
        q, kv = (s.b, s.t, s.n, s.h), (s.b, s.s, s.k, s.h)
        large = LARGEST[self.dtype] if self.values == "large" else 1.0
        factor = {"small": 1e-3, "large": large}.get(self.values, 1.0)
        of_q, of_k, of_v, of_dout = factor, factor, 1.0, 1.0
        if self.values == "edges":
            of_q, of_k, of_v, of_dout = Random(self.seed).choice(EDGE_FACTORS)
        numbers = "rng.standard_normal(shape) * factor"
        numbers = f"np.clip({numbers}, -65504, 65504)" if self.values == "edges" else numbers
        lines = [
            f"rng = np.random.default_rng({self.seed})",
            f"def draw(shape, factor={factor}, dtype={self.dtype!r}):",
            f"    return jnp.asarray({numbers}, dtype)",
            f"q, k = draw({q}, {of_q}), draw({kv}, {of_k})",
            f"v, dout = draw({kv}, {of_v}), draw({q}, {of_dout})",
            f"dlse = draw({(s.b, s.n, s.t)}, 1.0, 'float32')",
            *self._odd(),
            *self._bias(),
            f"mask = {self.tree.text() if self.tree else None}",
        ]
        return "\n".join(lines) + "\n"

    def _odd(self) -> list[str]:
        """Format the values that are not drawn from a normal distribution."""
        lines = []
        if self.values == "ties":
            lines.append("k = jnp.broadcast_to(k[:, :1], k.shape)")
        if self.values == "ones":
            lines.append("q, k = jnp.ones_like(q), jnp.ones_like(k)")
        if self.hidden:
            last = self.sizes.s // 2
            lines.append(f"k = k.at[:, {last}:].set(jnp.{self.hidden})")
            lines.append(f"v = v.at[:, {last}:].set(jnp.{self.hidden})")
        return lines

    def _bias(self) -> list[str]:
        if self.bias is None:
            return ["bias = None"]
        lines = [f"bias = draw({self.bias}, 1.0, {self.bias_dtype!r})"]
        far = "-jnp.inf" if self.bias_kind == "-inf" else "-1e9"
        if self.bias_dtype == "float16" and far == "-1e9":
            far = "-6e4"
        rows, keys = (max(self.bias[i] // 2, 1) for i in (-2, -1))
        where = {"rows": f"..., :{rows}, :", "keys": f"..., :{keys}", "-inf": f"..., -{keys}:"}
        if self.bias_kind in where:
            lines.append(f"bias = bias.at[{where[self.bias_kind]}].set({far})")
        return lines


def draw_operands(rng: Random, machine: Machine, sizes: Sizes | None = None) -> Operands:
    """Draw operands for a machine, with any given sizes."""
    sizes = sizes or draw_sizes(rng, machine)
    dtypes = ("bfloat16", "float16") if machine.platform == "gpu" else ("float32",) * 2
    dtype = rng.choice([*dtypes, "float32", "bfloat16", "float16"])
    tree = draw_tree(rng, sizes) if rng.random() < 0.8 else None
    tree = _ranges(rng) if rng.random() < 0.006 else tree
    bias = None
    if rng.random() < 0.35:
        bias = tuple(n if rng.random() < 0.7 else 1 for n in (sizes.b, sizes.n, sizes.t, sizes.s))
        bias = bias[rng.choice([0, 0, 0, 1, 2]) :]
    kind = rng.choice(["normal", "normal", "normal", "keys", "rows", "-inf"])
    bias_dtype = rng.choice([dtype, "float32"])
    hidden = rng.choice(["nan", "inf"]) if rng.random() < 0.04 else ""
    if hidden:  # in the second half of the keys
        limit = Leaf("KeyLimit", (sizes.s // 2,))
        tree = limit if tree is None else Node("&", (tree, limit))
    scale = rng.choice([None, None, None, 1.0, 0.3, -0.2, 1e-3])
    values, seed = rng.choice(VALUES), rng.randrange(10**6)
    if dtype == "float16" and rng.random() < 0.3:
        values = "edges"
    return Operands(sizes, dtype, values, tree, bias, kind, bias_dtype, hidden, scale, seed)


def draw_sizes(rng: Random, machine: Machine) -> Sizes:
    """Draw sizes: small ones on a CPU, up to 1,500 tokens on a GPU."""
    lengths = LENGTHS if machine.platform == "cpu" else (*LENGTHS, 256, 384, 777, 1024, 1500)
    t, s = rng.choice(lengths), rng.choice(lengths)
    s = t if rng.random() < 0.4 else s
    heads, head_dim = rng.choice(HEADS), rng.choice(HEAD_DIMS)
    return Sizes(rng.choice([1, 1, 2, 3]), t, s, *heads, head_dim)


def _ranges(rng: Random) -> Tree:
    """Draw a mask that hides many short ranges of keys."""
    ends = [3 * i + 2 for i in range(rng.choice([3, 18, 30]))]
    limits = ((Leaf("KeyLimit", (end,)), Leaf("KeyLimit", (end - 1,))) for end in ends)
    return Node("&", tuple(Node("~", (Node("&", (x, Node("~", (y,)))),)) for x, y in limits))
