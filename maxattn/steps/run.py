"""Call a model in one step: layers are computed, or their sums of earlier steps are added.

The state between steps is a dict from the names of predictions to `Added`; it starts empty.
Decisions use means over all devices of a mesh, so every device takes the same branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float

from maxattn.errors import InputError
from maxattn.jax_private.overriding import overriding
from maxattn.steps.layers import Layers, around
from maxattn.steps.value import BOTH, THIRD, USUAL, WITH, WITHOUT, Mix, Step

Sum = Any  # what layers added: arrays of the shapes of x


class Decision(NamedTuple):
    """The values that a deciding step compares with.

    Args:
        first: the sum of the first layers in the last computed step.
        numbers: of the last computed steps, as many as there are saved sums; -1 is none.
        row: number of steps since the last computed one.
    """

    first: Array
    numbers: Array
    row: Array


class Added(NamedTuple):
    """The sums that a prediction saves for later steps.

    Args:
        sums: for each call of `blocks`, the sums of its layers in the last computed steps, newest
            first.
        decision: None unless steps decide.
        computed: whether this step computed, if it decided.
    """

    sums: tuple[tuple[Sum, ...], ...] = ()
    decision: Decision | None = None
    computed: Array | None = None


Kept = Mapping[str, Added]
"""What is kept between steps, by the names of predictions; {} at first."""


def forward(
    step: Step,
    kept: Kept,
    model: Callable[..., Any],
    *args: Any,
    name: str = WITH,
    rows: Array | int | None = None,
    **named: Any,
) -> tuple[Any, Kept]:
    """Call a model under a step, for one prediction; return the prediction and what is kept.

    It is pure, and runs under `jit`, on a mesh and with remat. The step is a pytree: steps that
    differ in numbers alone share a compiled program.

    Args:
        step: of a `Steps`.
        kept: what the step before returned; {} at first.
        model: runs its layers by `ma.blocks`; `args` and `named` are its arguments.
        name: of the prediction; each has its own layers' sums.
        rows: number of samples that count in a decision, the first ones, where others fill up the
            devices of a mesh; default all.

    Raises:
        InputError: the model calls `ma.blocks` nowhere, or only inside a jit or remat of its own;
            or the step reuses, and nothing was kept for x of its shape.

    >>> steps = ma.steps.resolve(ma.steps.StepSettings(cache={"schedule": "X."}), 2, layers=3)
    >>> layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)])
    >>> x, kept = jnp.ones((1, 8)), {}
    >>> for step in steps:
    ...     y, kept = ma.steps.forward(step, kept, lambda x: ma.blocks(layers, x), x)
    >>> bool(jnp.allclose(y, ma.blocks(layers, x)))
    True
    """
    hook = _Hook(step, name, _kept_of(kept, name), rows)
    plain = not step.keeps and not step.weights and not step.blocks
    with overriding(step.attention):
        if plain and not step.skipped_in(name):
            return model(*args, **named), {}
        with around(hook):
            out = model(*args, **named)
    if not hook.sites:
        rule = "a step needs the layers of a model, and this one ran none by ma.blocks,"
        rule += " or inside a jit of its own"
        remedy = "run its layers as x = ma.blocks(self.layers, x, *beside)"
        raise InputError("model", getattr(model, "__name__", type(model).__name__), rule, remedy)
    if step.model_layers not in (0, hook.layers):
        rule = f"the steps are of a model of {step.model_layers} layers, and it ran {hook.layers}"
        remedy = f"resolve them with layers={hook.layers}"
        raise InputError("layers", step.model_layers, rule, remedy)
    if step.layers == "reuse":
        return out, kept
    return out, {name: hook.added} if step.keeps else {}


def guided(
    step: Step,
    kept: Kept,
    predict: Callable[[str], Float[Array, "B ..."]],
    scale: Any,
    *,
    batched: bool = False,
    rows: Array | int | None = None,
) -> tuple[Float[Array, "B ..."], Kept]:
    """Return the guided prediction of a step, and what is kept.

        v = without + scale * (with - without)

    Args:
        step, kept, rows: as for `forward`.
        predict: calls the model with the text of that name: "with", "without", "third" (the text,
            in a call that skips layers), or "both" (without and with, in twice the rows).
        scale: of guidance.
        batched: whether a step with two predictions makes them in one call, "both".
    """
    found, kept = predictions(step, kept, predict, batched=batched, rows=rows)
    return found.mixed(scale, step.mix), kept


def predictions(
    step: Step,
    kept: Kept,
    predict: Callable[[str], Any],
    *,
    batched: bool = False,
    rows: Any = None,
) -> tuple[Predictions, Kept]:
    """Return the separate predictions of a step, and `kept`; arguments as for `guided`."""
    if step.guidance == "zero":
        shape = jax.eval_shape(partial(predict, WITH))
        return Predictions(jnp.zeros(shape.shape, jnp.float32)), {}
    names = step.predictions
    if batched and step.guidance == "two" and not step.skipped_in(WITHOUT):
        names = (BOTH, *names[2:])
    found, after = {}, {}
    for name in names:
        out, left = forward(step, kept, predict, name, name=name, rows=rows)
        found[name], after = out.astype(jnp.float32), {**after, **left}
    if BOTH in found:
        found[WITHOUT], found[WITH] = jnp.split(found[BOTH], 2)
    return Predictions(found[WITH], found.get(WITHOUT), found.get(THIRD)), after


class Predictions(NamedTuple):
    """The predictions of a step: with the text, without it, and one that skips layers.

    Sources of the mixes: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598; CFG-Zero*: Fan et
    al. 2025, https://arxiv.org/abs/2503.18886; rescale: Lin et al. 2023,
    https://arxiv.org/abs/2305.08891; skipped layers: https://github.com/Stability-AI/sd3.5.
    """

    with_: Float[Array, "B ..."]
    without: Float[Array, "B ..."] | None = None
    third: Float[Array, "B ..."] | None = None

    def mixed(self, scale: Any, mix: Mix = USUAL) -> Float[Array, "B ..."]:
        """Mix them: u + scale (c - u), c with the text and u without.

        CFG-Zero* first fits u to c, u (c . u) / (u . u) for each sample. A third prediction s leads
        away: + third_scale (c - s), or s + third_scale (c - s) without u. A rescaled mix has a
        share of the standard deviation of c.
        """
        c, u, s = self
        inner: Any = {"axis": tuple(range(1, c.ndim)), "keepdims": True}
        if u is not None and mix.zero_star:
            u = u * (jnp.sum(c * u, **inner) / (jnp.sum(u * u, **inner) + 1e-8))
        mixed = c if u is None else u + scale * (c - u)
        if s is not None:
            mixed = (s if u is None else mixed) + mix.third_scale * (c - s)
        if mix.rescale and (u is not None or s is not None):
            ratio = jnp.std(c, ddof=1, **inner) / jnp.std(mixed, ddof=1, **inner)
            mixed = mix.rescale * (mixed * ratio) + (1 - mix.rescale) * mixed
        return mixed


# ---- the hook around the layers ------------------------------------------------------------------


class _Hook:
    """Replaces each call of `blocks` in one call of a model."""

    def __init__(self, step: Step, name: str, before: Added | None, rows: Any) -> None:
        self.step, self.name, self.before, self.rows = step, name, before or Added(), rows
        self.added = Added()
        self.sites = self.layers = 0  # calls of `blocks` so far, and their layers
        self.trace = get_opaque_trace_state(convention="maxattn")

    def __call__(self, layers: Layers, x: Any) -> Any:
        """Run the layers before the span, compute the span or reuse its sum, run those after it."""
        if get_opaque_trace_state(convention="maxattn") != self.trace:
            return layers.all(x)  # a jit or remat of the model's own: sums could not leave it
        step, site, offset = self.step, self.sites, self.layers
        self.sites, self.layers = site + 1, offset + layers.count
        layers = layers._replace(run=partial(self._run, layers, offset))
        sums = self.before.sums[site] if site < len(self.before.sums) else ()
        if step.layers != "compute":
            theirs, own = ([*map(jnp.shape, jax.tree.leaves(tree))] for tree in (sums[:1], x))
            too_few = len(sums) < max(len(step.weights), step.keeps)
            other = bool(step.blocks) != (self.before.decision is not None)
            if too_few or other or (layers.add and theirs != own):
                rule = "the step reuses, and by these steps nothing was kept for x of this shape"
                raise InputError("kept", self.name, rule, "pass on what the step before returned")
        first, last = self._span(layers.count, site, offset)
        head = layers.run(x, range(first))
        if step.blocks and site == 0:
            self._decide(jax.tree.leaves(head)[0] - jax.tree.leaves(x)[0])

        def compute() -> tuple[Any, tuple[Sum, ...]]:
            y = layers.run(head, range(first, last))
            if not step.keeps:
                return y, ()
            # In the dtype of y, as a step that reuses returns it.
            new = jax.tree.map(lambda y, x: (y - x).astype(y.dtype), y, head) if layers.add else y
            # Both branches keep as many sums, of one sharding; the second one has no weight.
            older = sums or (jax.tree.map(lambda x: 0 * x, new),) * bool(step.blocks)
            return y, (new, *older)[: step.keeps]

        def reuse() -> tuple[Any, tuple[Sum, ...]]:
            y = self._total(sums)
            y = jax.tree.map(lambda x, s: (x + s).astype(s.dtype), head, y) if layers.add else y
            return y, sums

        if self.added.computed is not None:
            y, kept = jax.lax.cond(self.added.computed, compute, reuse)
        else:
            y, kept = reuse() if step.layers == "reuse" else compute()
        self.added = self.added._replace(sums=(*self.added.sums, kept))
        return layers.run(y, range(last, layers.count))

    def _span(self, count: int, site: int, offset: int) -> tuple[int, int]:
        """Return the first layer of a call of `blocks` that is reused, and the one after the last.

        If steps decide, the first layers of the first call decide, and run in every step.
        """
        if not self.step.blocks:
            first, last = self.step.span or (0, offset + count)
            return min(max(first - offset, 0), count), min(max(last - offset, 0), count)
        if site == 0 and self.step.blocks > count:
            rule = f"the first call of ma.blocks, which decides, runs {count} layers"
            remedy = f"set first_block.blocks to {count} or less"
            raise InputError("first_block.blocks", self.step.blocks, rule, remedy)
        return (0 if site else self.step.blocks), count

    def _run(self, layers: Layers, offset: int, x: Any, span: range) -> Any:
        """Run the layers of a span, without those that are skipped."""
        skipped = (n - offset for n in self.step.skipped_in(self.name))
        start = span.start
        with around(Layers.all):  # a layer's own calls of `blocks` are a part of it
            for stop in (*(n for n in skipped if n in span), span.stop):
                x = layers.run(x, range(start, stop)) if stop > start else x
                start = stop + 1
        return x

    def _total(self, sums: tuple[Sum, ...]) -> Sum:
        """Return the sum to add: the last one, or an extrapolation of two."""
        if 1 in (len(sums), len(self.step.weights)):
            return sums[0]
        weights = self.step.weights or self._line()

        def line(last: Array, older: Array) -> Array:
            newest, oldest = (x.astype(jnp.float32) for x in (last, older))
            return (weights[0] * newest + weights[1] * oldest).astype(last.dtype)

        return jax.tree.map(line, *sums[:2])

    def _line(self) -> tuple[Any, ...]:
        """Return weights that extrapolate the last two sums to this step."""
        assert self.before.decision is not None, "a step that decides has one"
        last, older = self.before.decision.numbers.astype(jnp.float32)
        share = jnp.where(older < 0, 0.0, (self.step.number - last) / (last - older))
        return 1 + share, -share

    def _decide(self, first: Array) -> None:
        """Decide from the first layers' sum whether the step computes, and save the decision."""
        step, before = self.step, self.before.decision
        if step.layers == "compute":
            numbers = jnp.full(step.keeps, -1, jnp.int32).at[0].set(step.number)
            self.added = Added((), Decision(first, numbers, jnp.int32(0)))
            return
        assert before is not None, "a step that decides has one"
        numbers = jnp.concatenate([jnp.int32(step.number)[None], before.numbers[:-1]])
        anew = Decision(first, numbers, jnp.int32(0))
        mean = partial(_mean, self.rows, 2 if self.name == BOTH else 1)
        change = mean(first - before.first) / mean(before.first)
        # An infinite threshold reuses, also if the first layers added nothing.
        reuse = ((change < step.threshold) | jnp.isinf(step.threshold)) & (before.row < step.most)
        again = before._replace(row=before.row + 1)
        decision = jax.tree.map(partial(jnp.where, reuse), again, anew)
        self.added = Added((), decision, ~reuse)


def _mean(rows: Any, calls: int, x: Array) -> Float[Array, ""]:
    """Return the mean absolute value over the batch rows of wanted samples."""
    each = jnp.mean(jnp.abs(x.astype(jnp.float32)), axis=tuple(range(1, x.ndim)))
    where = None if rows is None else jnp.arange(len(each)) % (len(each) // calls) < rows
    return jnp.mean(each, where=where)


def _kept_of(kept: Kept, name: str) -> Added | None:
    """Return the sums of a prediction; the last batch rows of "both" are those with the text."""
    if name in kept or BOTH not in kept:
        return kept.get(name)
    both, row = kept[BOTH], int(name != WITHOUT)
    sums = jax.tree.map(lambda x: jnp.split(x, 2)[row], both.sums)
    own = both.decision
    decision = own and own._replace(first=jnp.split(own.first, 2)[row])
    return both._replace(sums=sums, decision=decision)
