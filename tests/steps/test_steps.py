"""A model with steps, compared with a plain loop over its layers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import maxattn as ma
from maxattn.errors import InputError, Unsupported
from maxattn.steps import StepSettings

LAYERS, WIDTH, ROWS = 4, 8, 2
TEXT = jnp.asarray(np.random.default_rng(7).normal(size=(ROWS, WIDTH)), "float32")


class Block(nnx.Module):
    """x + a layer that depends on the arguments beside x."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, e):
        return x + jnp.tanh(self.linear(x) + e)


class Model(nnx.Module):
    """A user's model: a list of layers, a stack of them, or two calls of `blocks`."""

    def __init__(self, kind="list"):
        keys = jax.random.split(jax.random.key(0), LAYERS)
        make = lambda key: Block(nnx.Rngs(key))  # noqa: E731
        stack = {"list": lambda keys: nnx.List(map(make, keys)), "stack": nnx.vmap(make)}
        own = stack["list" if kind == "two" else kind]
        self.parts = nnx.List([own(keys)] if kind != "two" else [own(keys[:1]), own(keys[1:])])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(9))

    def __call__(self, x, t, text):
        e = jnp.sin(t)[:, None] + text
        for part in self.parts:
            x = ma.blocks(part, x, e)
        return self.head(x)


def plain(model, x, t, text, added=None, span=(0, LAYERS), skip=()):
    """Run the layers in a Python loop; return the output, and what the span's layers added."""
    layers = [layer for part in model.parts for layer in part]
    e, before = jnp.sin(t)[:, None] + text, None
    for number, layer in enumerate(layers):
        before = x if number == span[0] else before
        if number in range(*span) and added is not None:
            x = x + added if number == span[0] else x
        elif number not in skip:
            x = layer(x, e)
        after = x if number == span[1] - 1 else x if before is None else None
        if number == span[1] - 1:
            assert before is not None
            new = after - before
    return model.head(x), new


def sampled(model, steps, jit=True):
    """Sample in a user's own loop; return the samples of all steps."""
    graph, state = nnx.split(model)

    def one(step, kept, state, x, t):
        predict = nnx.merge(graph, state)
        v, kept = ma.steps.forward(step, kept, predict, x, t, TEXT)
        return x - 0.1 * v, kept

    one = jax.jit(one) if jit else one
    x, kept, found = jnp.ones((ROWS, WIDTH)), {}, []
    for i, step in enumerate(steps):
        x, kept = one(step, ma.steps.step_needs(step, kept), state, x, jnp.full(ROWS, 0.3 * i))
        found.append(x)
    return jnp.stack(found)


def by_hand(model, n, choose, order=0, span=(0, LAYERS)):
    """Sample in a plain loop; `choose` returns a letter from step, change and batch row."""
    x, kept, first, row, letters, found = jnp.ones((ROWS, WIDTH)), [], None, 0, "", []
    layer = model.parts[0][0]
    for i in range(n):
        t = jnp.full(ROWS, 0.3 * i)
        own = layer(x, jnp.sin(t)[:, None] + TEXT) - x
        size = lambda a: jnp.abs(a).mean()  # noqa: E731
        letters += choose(i, 1.0 if first is None else size(own - first) / size(first), row)
        if letters[-1] == "X":
            v, new = plain(model, x, t, TEXT, span=span)
            kept, first, row = [(i, new), *kept][:2], own, 0
        else:
            (last, a), (older, b) = kept[0], kept[-1]
            line = order and len(kept) > 1
            total = a + (i - last) / (last - older) * (a - b) if line else a
            v, _ = plain(model, x, t, TEXT, total, span)
            row += 1
        x = x - 0.1 * v
        found.append(x)
    return jnp.stack(found), letters


def walked(model, letters, order=0, span=(0, LAYERS)):
    return by_hand(model, len(letters), lambda i, *_: letters[i], order, span)[0]


def resolved(n, **settings):
    return ma.steps.resolve(StepSettings(**settings), n, LAYERS)


@pytest.mark.parametrize("kind", ["list", "stack", "two"])
def test_without_settings_the_bits_are_those_of_the_loop(kind):
    model = Model(kind)
    steps = ma.steps.resolve(None, 3, LAYERS)
    x, t = jnp.ones((ROWS, WIDTH)), jnp.zeros(ROWS)
    out, kept = ma.steps.forward(steps[0], {}, model, x, t, TEXT)
    assert not kept and (out == model(x, t, TEXT)).all()
    if kind != "stack":
        assert (out == plain(model, x, t, TEXT)[0]).all()
    assert (
        steps.forwards == steps.whole == 3 and str(steps) == "all 3 steps are computed: 3 forwards"
    )


@pytest.mark.parametrize("kind", ["list", "stack", "two"])
@pytest.mark.parametrize(
    ("order", "span"), [(0, (0, LAYERS)), (1, (0, LAYERS)), (1, (1, 3)), (0, (0, 2))]
)
def test_a_schedule_is_a_loop_over_what_layers_added(kind, order, span):
    letters = "XX.X..X."
    cache = {"schedule": letters, "order": order, "layers": None if span == (0, LAYERS) else span}
    steps = resolved(8, cache=cache)
    found = sampled(Model(kind), steps)
    expected = walked(Model("two" if kind == "two" else "list"), letters, order, span)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert steps.forwards == 4 + 4 * (1 - (span[1] - span[0]) / LAYERS)


@pytest.mark.parametrize("kind", ["list", "stack", "two"])
@pytest.mark.parametrize(("order", "most"), [(0, 2), (1, 2), (1, 9)])
def test_steps_decide_by_what_the_first_layers_add(kind, order, most):
    how = {"threshold": 0.4, "first": 2, "most": most}

    def choose(i, change, row):
        return "." if i >= 2 and change < 0.4 and row < most else "X"

    expected, letters = by_hand(Model("list"), 12, choose, order, (1, LAYERS))
    assert {"X", "."} == set(letters[2:]), "it decides both ways"
    steps = resolved(12, cache={"first_block": how, "order": order})
    np.testing.assert_allclose(sampled(Model(kind), steps), expected, atol=2e-6)
    assert steps.letters == "XX" + 10 * "?"


def test_letters_beside_decisions_are_followed():
    how = {"threshold": 1e-9, "most": 1}
    steps = resolved(8, cache={"schedule": "X..??X?X", "first_block": how})
    found = sampled(Model("list"), steps)
    expected = walked(Model("list"), "X..XXXXX", 0, (1, LAYERS))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert steps.letters == "X..??X?X" and steps.forwards == 6 + 2 / LAYERS


@pytest.mark.parametrize("order", [0, 1])
def test_decisions_are_of_the_whole_mesh_and_not_of_rows_that_fill_it_up(order):
    model, mesh = Model("stack"), jax.make_mesh((4,), ("data",))
    steps = resolved(8, cache={"first_block": {"threshold": 0.4}, "order": order})
    graph, state = nnx.split(model)

    @partial(jax.jit, static_argnums=5)
    def one(step, kept, state, x, t, rows):
        v, kept = ma.steps.forward(step, kept, nnx.merge(graph, state), x, t, text[: len(x)],
                                   rows=rows)  # fmt: skip
        return x - 0.1 * v, kept

    text = jnp.concatenate([TEXT, 50 * TEXT])
    finals = []
    for rows, x in ((None, jnp.ones((2, WIDTH))), (2, jnp.ones((4, WIDTH)))):
        kept = {}
        x = x if rows is None else jax.device_put(x, NamedSharding(mesh, P("data")))
        for i, step in enumerate(steps):
            x, kept = one(step, kept, state, x, jnp.full(len(x), 0.3 * i), rows)
        finals.append(np.asarray(x)[:2])
    np.testing.assert_allclose(*finals, atol=2e-6)


MIXES = {
    "plain": {},
    "star": {"zero_star": True},
    "rescale": {"rescale": 0.7},
    "third": {"skip": {"layers": [1, 2], "start": 0.0, "stop": 1.0, "scale": 1.5}},
    "negative": {"skip": {"layers": [1], "prediction": "negative", "start": 0.0, "stop": 1.0}},
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", MIXES)
def test_guidance_mixes_predictions(name, batched):
    model, how = Model("list"), MIXES[name]
    steps = ma.steps.resolve(StepSettings(guidance=how or None), 6, LAYERS, guided=True)
    x, t = jnp.ones((ROWS, WIDTH)) * jnp.arange(1, WIDTH + 1), jnp.full(ROWS, 0.5)
    texts = {"with": TEXT, "third": TEXT, "without": -TEXT}

    def predict(which):
        if which == "both":
            two = jnp.concatenate
            return model(two([x, x]), two([t, t]), two([-TEXT, TEXT]))
        return model(x, t, texts[which])

    found, _ = ma.steps.guided(steps[2], {}, predict, 3.0, batched=batched)
    skip = how.get("skip", {}).get("layers", ())
    c, u = plain(model, x, t, TEXT)[0], plain(
        model, x, t, -TEXT, skip=skip if name == "negative" else ())[0]  # fmt: skip
    if name == "star":
        u = u * (c * u).sum(1, keepdims=True) / (u * u).sum(1, keepdims=True)
    v = u + 3.0 * (c - u)
    if name == "third":
        v = v + 1.5 * (c - plain(model, x, t, TEXT, skip=skip)[0])
    if name == "rescale":
        ratio = c.std(1, ddof=1, keepdims=True) / v.std(1, ddof=1, keepdims=True)
        v = 0.7 * v * ratio + 0.3 * v
    np.testing.assert_allclose(found, v, rtol=1e-5, atol=1e-5)


def test_steps_of_zeros_call_nothing_and_a_text_that_ends_needs_no_other():
    how = {"zero_steps": 2, "stop": 0.5}
    steps = ma.steps.resolve(StepSettings(guidance=how), 8, LAYERS, guided=True)
    assert [len(step.predictions) for step in steps] == [0, 0, 2, 2, 1, 1, 1, 1]
    shaped = lambda which: jnp.ones((2, 3))  # noqa: E731
    found, kept = ma.steps.guided(steps[0], {}, shaped, 5.0)
    assert (found == 0).all() and found.shape == (2, 3) and not kept
    assert steps.forwards == 8 and steps.whole == 16


def test_a_prediction_alone_takes_its_rows_of_a_call_of_both():
    settings = StepSettings(cache={"schedule": "XX.X...."}, guidance={"stop": 0.5})
    steps = ma.steps.resolve(settings, 8, LAYERS, guided=True)
    finals = []
    model, texts = Model("list"), {"with": TEXT, "without": -TEXT}

    def predict(x, t, which):
        if which == "both":
            return model(*(jnp.concatenate([a, b]) for a, b in ((x, x), (t, t), (-TEXT, TEXT))))
        return model(x, t, texts[which])

    for batched in (False, True):
        x, kept = jnp.ones((ROWS, WIDTH)), {}
        for i, step in enumerate(steps):
            at = partial(predict, x, jnp.full(ROWS, 0.3 * i))
            v, kept = ma.steps.guided(step, kept, at, 2.0, batched=batched)
            x = x - 0.1 * v
        finals.append(x)
    np.testing.assert_allclose(*finals, atol=1e-5)


def test_one_program_serves_steps_that_differ_in_numbers():
    cache = {"schedule": "XX.X..X...X.", "order": 1}
    steps, traces = ma.steps.resolve(StepSettings(cache=cache), 12, layers=2), []

    @jax.jit
    def one(step, kept, x):
        traces.append(step.letter)
        return ma.steps.forward(step, kept, lambda x: ma.blocks([jnp.sin, jnp.cos], x), x)

    kept, x = {}, jnp.ones(3)
    for step in steps:
        x, kept = one(step, ma.steps.step_needs(step, kept), x)
    # X with nothing before it and with a sum, '.' of order 1; the last '.' is one of these.
    assert len(traces) == 3


def test_remat_and_gradients_go_through_blocks():
    model = Model("stack")
    config = ma.AttentionConfig(remat_policy="FULL")

    def loss(model, config):
        e = TEXT
        return (ma.blocks(model.parts[0], jnp.ones((ROWS, WIDTH)), e, config=config) ** 2).sum()

    one, other = (nnx.grad(partial(loss, config=c))(model) for c in (None, config))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), one, other)


def test_what_each_layer_has_of_its_own_goes_last():
    own = jnp.arange(LAYERS, dtype=jnp.float32)
    for kind in ("list", "stack"):
        part = Model(kind).parts[0]
        call = lambda layer, x, e, n: layer(x, e) + n  # noqa: E731
        found = ma.blocks(part, jnp.ones((ROWS, WIDTH)), TEXT, each=own, call=call)
        x = jnp.ones((ROWS, WIDTH))
        for n, layer in enumerate(Model("list").parts[0]):
            x = layer(x, TEXT) + n
        np.testing.assert_allclose(found, x, rtol=1e-6)


def test_dropout_in_a_stack_draws_anew_in_each_call():
    make = nnx.vmap(lambda key: nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=key)))
    stack = make(jax.random.split(jax.random.key(0), 3))
    one, other = (ma.blocks(stack, jnp.ones(64)) for _ in range(2))
    assert (one != other).any()


def test_the_middle_of_a_unet_is_reused_as_it_is():
    middle = [lambda x: 3 * x]
    steps = ma.steps.resolve(StepSettings(cache={"interval": 2}), 4, 1)
    x, kept, found = jnp.ones(2), {}, []
    for i, step in enumerate(steps):
        y, kept = ma.steps.forward(step, kept, lambda x: ma.blocks(middle, x, add=False), x + i)
        found.append(float(y[0]))
    assert found == [3, 3, 9, 9]


def test_attention_of_a_step_replaces_the_config_s():
    attn = ma.FlaxAttention(16, heads=2, dim_head=8, rngs=nnx.Rngs(0))
    model = jax.jit(lambda x: ma.blocks([lambda x: x + attn(x)], x))
    attention = [{"steps": [1, 2], "overrides": ["attention=cudnn"]}]
    steps = ma.steps.resolve(StepSettings(attention=attention), 3, 1)
    x = jnp.ones((1, 8, 16))
    assert (ma.steps.forward(steps[0], {}, model, x)[0] == model(x)).all()
    with pytest.raises(Unsupported, match="cudnn"):
        ma.steps.forward(steps[1], {}, model, x)
    assert "attention=cudnn" in str(steps)


NAMES = {"list": ["parts.0.0", "parts.0.1"], "stack": ["parts.0[0]", "parts.0[1]"]}


@pytest.mark.parametrize(("kind", "names"), NAMES.items())
def test_an_audit_names_calls_of_functions_by_their_layer(kind, names):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            q = self.linear(x).reshape(1, 8, 2, 8)
            return x + ma.attention(q, q, q).reshape(x.shape)

    class Net(nnx.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), 2)
            make = lambda key: Layer(nnx.Rngs(key))  # noqa: E731
            stacked = nnx.vmap(make)(keys) if kind == "stack" else nnx.List(map(make, keys))
            self.parts = nnx.List([stacked])

        def __call__(self, x):
            return ma.blocks(self.parts[0], x)

    found = ma.audit(Net(), jnp.ones((1, 8, 16)), kernels=())
    assert [layer.name for layer in found.layers] == names


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap])
def test_layers_inside_a_transformation_of_the_model_s_own_are_refused(wrap):
    model, x = wrap(lambda x: ma.blocks([jnp.sin], x)), jnp.ones(2)
    step = ma.steps.resolve(StepSettings(cache={"schedule": "X."}), 2, 1)[0]
    with pytest.raises(InputError, match="inside a jit of its own"):
        ma.steps.forward(step, {}, model, x)
    assert (model(x) == jnp.sin(x)).all(), "and no later call has the step"


def test_layers_that_run_blocks_are_layers():
    inner = lambda x: ma.blocks([jnp.sin, jnp.cos], x)  # noqa: E731
    found = []
    for layer in (inner, lambda x: jnp.cos(jnp.sin(x))):
        kept = {}
        for step in ma.steps.resolve(StepSettings(cache={"first_block": {}}), 4, 2):
            x = jnp.full(2, 1 + 0.01 * step.number)
            y, kept = ma.steps.forward(step, kept, lambda x: ma.blocks([layer] * 2, x), x)  # noqa: B023
        found.append(y)
    assert (found[0] == found[1]).all() and not kept["with"].computed


def test_letters_count_if_first_layers_add_nothing_and_dtypes_are_those_of_layers():
    layers = [lambda x: x, lambda x: (x + 1).astype(jnp.bfloat16)]
    settings = StepSettings(cache={"schedule": "X.?X", "order": 1, "first_block": {}})
    steps, kept, found = ma.steps.resolve(settings, 4, 2), {}, []
    one = jax.jit(ma.steps.forward, static_argnums=2, donate_argnums=1)
    for step in steps[:3]:  # a donated buffer must not be there twice
        forward = one if step.number else ma.steps.forward
        y, kept = forward(step, kept, lambda x: ma.blocks(layers, x), jnp.ones(2))
        found.append((y.dtype, kept["with"].computed))
    assert found == [(jnp.bfloat16, c) for c in (None, False, True)]


def test_a_model_without_blocks_and_a_step_without_sums_are_refused():
    steps = resolved(3, cache={"schedule": "X.X"})
    with pytest.raises(InputError, match=r"ran none by ma.blocks"):
        ma.steps.forward(steps[0], {}, jnp.sin, jnp.ones(2))
    with pytest.raises(InputError, match="nothing was kept"):
        ma.steps.forward(steps[1], {}, Model("list"), jnp.ones((ROWS, WIDTH)), jnp.ones(ROWS), TEXT)
    with pytest.raises(InputError, match="at least one layer"):
        ma.blocks([], jnp.ones(2))
    with pytest.raises(InputError, match="for each of 2 layers"):
        ma.blocks([jnp.add] * 2, jnp.ones(2), each=jnp.ones(3))


@pytest.mark.parametrize("cache", [{"interval": 2}, {"first_block": {}}])
@pytest.mark.parametrize("other", ["rows", "nothing", "steps"])
def test_what_other_steps_kept_is_refused(cache, other):
    model = lambda x: ma.blocks([jnp.sin, jnp.cos], x)  # noqa: E731
    steps = ma.steps.resolve(StepSettings(cache=cache), 4, 2)
    theirs = {"first_block": {}} if "interval" in cache else {"interval": 2}
    first = ma.steps.resolve(StepSettings(cache=theirs), 4, 2)[0] if other == "steps" else steps[0]
    _, kept = ma.steps.forward(first, {}, model, jnp.ones((1 + (other != "rows"), 3)))
    with pytest.raises(InputError, match="nothing was kept"):
        ma.steps.forward(steps[1], {} if other == "nothing" else kept, model, jnp.ones((2, 3)))


def test_steps_of_another_model_are_refused_while_it_is_traced():
    given = jnp.ones((ROWS, WIDTH)), jnp.ones(ROWS), TEXT
    wrong = ma.steps.resolve(StepSettings(cache={"interval": 2}), 4, LAYERS + 1)
    with pytest.raises(InputError, match=f"of a model of {LAYERS + 1} layers, and it ran {LAYERS}"):
        jax.eval_shape(lambda: ma.steps.forward(wrong[0], {}, Model("list"), *given))
    cache = {"first_block": {"threshold": 0.1, "blocks": 2}}
    with pytest.raises(InputError, match="which decides, runs 1 layers"):
        ma.steps.forward(resolved(4, cache=cache)[0], {}, Model("two"), *given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_layers_take_may_be_a_tree(dtype):
    """Two streams, for a picture and its text; sums keep their dtypes."""
    weights = jax.random.normal(jax.random.key(2), (LAYERS, WIDTH, WIDTH), dtype) / 4

    def layer(w, both):
        x, c = both["x"], both["c"]
        return {"x": x + jnp.tanh(x @ w + c.mean(0)), "c": c + jnp.tanh(c @ w)}

    layers = [partial(layer, w) for w in weights]
    steps = resolved(6, cache={"schedule": "XX.X..", "order": 1, "layers": (1, 3)})
    key, kept, before = jax.random.key(3), {}, []
    for i, step in enumerate(steps):
        x = {n: jax.random.normal(jax.random.fold_in(key, i), (3, WIDTH), dtype) for n in "xc"}
        got, kept = ma.steps.forward(step, kept, lambda x: ma.blocks(layers, x), x)
        head = layers[0](x)
        if step.letter == "X":
            middle = layers[2](layers[1](head))
            before = [(i, jax.tree.map(jnp.subtract, middle, head)), *before][:2]
        else:
            (last, a), (older, b) = before
            share = (i - last) / (last - older)
            line = jax.tree.map(lambda a, b, s=share: (a + s * (a - b)).astype(a.dtype), a, b)
            middle = jax.tree.map(jnp.add, head, line)
        want = layers[3](middle)
        assert got["x"].dtype == dtype
        for name in "xc":
            close = (
                {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.03, "atol": 0.05}
            )
            ours, theirs = (np.asarray(y[name], "float32") for y in (got, want))
            np.testing.assert_allclose(ours, theirs, **close)


@pytest.mark.parametrize(("order", "sums"), [(0, 1), (1, 2)])
def test_memory_is_that_of_the_sums(order, sums):
    model, x = Model("stack"), jnp.ones((ROWS, WIDTH))
    steps = resolved(8, cache={"schedule": "XX.X.X.X", "order": order})

    def left(step, kept, x):
        return ma.steps.forward(step, kept, model, x, jnp.ones(ROWS), TEXT)[1]

    assert steps.memory(left, x) == sums * ROWS * WIDTH * 4
