"""Streams with drawn windows, sinks and positions, against a float64 model without a cache."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import numpy as np
from flax import nnx

from tests.fuzz.case import Case, Check, Machine, Names
from tests.fuzz.float64 import EPS, Bounded, compare, softmax
from tests.fuzz.modules import Params, linear, numbers_of, rotated

SETUP = """\
from flax import nnx
st = ma.Stream(tokens_per_frame={tokens}, frames_per_block={size}, window={window}, sink={sink},
               first_frame_alone={alone})
videos, later = {videos}, {later}  # frames of each block, and of each block that is recomputed
axes = {axes}
config = ma.AttentionConfig(**{{f"ici_{{axis}}_parallelism": n for axis, n in axes.items()}})
mesh = config.make_mesh(jax.devices()[:int(np.prod([*axes.values()]))]) if axes else None
clips = np.random.default_rng({seed}).standard_normal((len(videos), 3, {frames}, {tokens}, 8))
layers = [ma.FlaxAttention(8, heads={heads}, kv_heads={kv}, dim_head={h}, config=config, mesh=mesh,
          dtype={dtype!r}, rngs=nnx.Rngs({seed} + i)) for i in range({layers})]
whole, outs = ma.rope_1d({h}, {frames} * {tokens}, {theta}, style={style!r}), []
def table(rows):
    if {positions!r} != "absolute":
        return ma.rope_1d({h}, {slots} * {tokens}, {theta}, style={style!r})
    at = np.array([[f * {tokens} + t for f in frames for t in range({tokens})] for frames in rows])
    at = at[0] if len(at) == 1 else at
    return ma.Rotary(np.asarray(whole.cos)[at], np.asarray(whole.sin)[at], style={style!r})
def step(x, table, cache):
    for i, layer in enumerate(layers):
        x, cache = layer(x, rotary_emb=table, cache=cache.layer(i))
    return x, cache
step = {jit}
def block(cache, rows, kinds):
    for kind in kinds:
        x = np.stack([clips[r, kind, frames].reshape(-1, 8) for r, frames in rows])
        unwritten = {unwritten} and cache.stage == "empty" and kind == 0
        how = cache.unwritten() if unwritten else cache
        y, written = step(jnp.asarray(x, {dtype!r}), table([f for _, f in rows]), how)
        cache = cache if unwritten else written
        outs.append(y)
    return cache.advance()
def run():
    made = []
    for r, (parts, again) in enumerate(videos):
        cache = st.cache(layers={layers}, batch=1, kv_heads={kv}, dim_head={h}, dtype={dtype!r},
            mesh=mesh, frames={given}, positions={positions!r}, context={context!r},
            per_layer={per_layer})
        for frames in parts:
            if len(frames) != cache.own:
                cache = cache.prefix(len(frames))
            cache = block(cache, [(r, frames)], (0, 1))
        if again:
            cache = cache.refill()
            for frames in again:
                cache = block(cache, [(r, frames)], (2,))
            cache = cache.refilled(st, parts[-1][-1] + 1)
        made.append(cache)
    cache = ma.KVCache.stacked(made) if len(made) > 1 else made[0]
    for rows in later:
        cache = block(cache, list(enumerate(rows)), (0, 1))
with jax.enable_x64({x64}):
    run()
"""
JITS = ("step", "jax.jit(step)", "jax.jit(step, donate_argnums=2)")
AXES = ({"context": 2}, {"tensor": 2}, {"context": 2, "tensor": 2})
Frames = list[int]


class Drawn(NamedTuple):
    """A stream, its module, and the frames of each block of each video."""

    tokens: int
    size: int
    window: int | None
    sink: int
    alone: bool
    positions: str
    heads: int
    kv: int
    h: int
    theta: float
    style: str
    videos: list[tuple[list[Frames], list[Frames]]]
    later: list[list[Frames]]
    dtype: str

    @property
    def budget(self) -> int | None:
        return None if self.window is None else self.window * self.size

    def blocks(self, frames: Frames, alone: bool) -> list[Frames]:
        """Split frames into blocks."""
        first = frames[:1] if alone else []
        rest = frames[len(first) :]
        cut = [rest[i : i + self.size] for i in range(0, len(rest), self.size)]
        return [first, *cut] if first else cut

    def seen(self, end: int) -> set[int]:
        """Return the frames that a block ending before frame `end` attends to."""
        if self.budget is None or end <= self.budget:
            return {*range(end)}
        return {*range(self.sink), *range(end - self.budget + self.sink, end)}


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a stream, one to three videos, and how they continue as one batch."""
    axes = rng.choice(AXES) if machine.devices >= 4 and rng.random() < 0.2 else {}
    size, window = rng.choice([1, 2, 3]), rng.choice([None, 1, 2, 3, 4])
    sink = rng.randint(0, (window - 1) * size) if window else 0
    heads, kv = rng.choice([(4, 4), (8, 4)] if axes else [(2, 2), (4, 2), (2, 1), (3, 3)])
    positions = rng.choice(["absolute", "absolute", "slots_with_sink" if sink else "slots"])
    drawn = Drawn(
        rng.choice([2, 4] if axes else [1, 2, 3]), size, window, sink, rng.random() < 0.4,
        positions, heads, kv, rng.choice([4, 6, 8]), rng.choice([100.0, 1e4]),
        rng.choice(["interleaved", "half"]), [], [],
        "bfloat16" if machine.platform == "gpu" else "float32",
    )  # fmt: skip
    for _ in range(rng.choice([1, 1, 2, 3])):
        drawn.videos.append(_draw_video(rng, drawn))
    for block in range(rng.choice([0, 1, 2, 4])):
        ends = [parts[-1][-1] + 1 + block * size for parts, _ in drawn.videos]
        drawn.later.append([[*range(end, end + size)] for end in ends])
    frames = max(parts[-1][-1] for parts, _ in drawn.videos) + 1 + len(drawn.later) * size
    given = None if window else frames + rng.choice([0, 1, 3])
    jit = rng.choice(JITS[bool(axes) :])  # on a mesh each pass would compile again
    # A donated cache is used up, and passes over an unwritten one return it unchanged.
    unwritten = rng.random() < 0.4 and "donate" not in jit
    source = SETUP.format(
        **drawn._asdict(), axes=axes, seed=rng.randrange(10**6), frames=frames, given=given,
        slots=drawn.budget or given, layers=rng.choice([1, 2]), jit=jit,
        unwritten=unwritten, per_layer=rng.random() < 0.3, x64=rng.random() < 0.3,
        context=rng.choice(["heads", "tokens"]),
    )  # fmt: skip
    return Case(source, check_of(drawn), never_refused=True)


def _draw_video(rng: Random, drawn: Drawn) -> tuple[list[Frames], list[Frames]]:
    """Draw the blocks of a video, some of them in one prefix, and those of a refill."""
    count = drawn.alone + drawn.size * rng.randint(1, 3 + 2 * (drawn.window or 1))
    parts = drawn.blocks([*range(count)], drawn.alone)
    if rng.random() < 0.3:
        most = drawn.budget if drawn.budget and drawn.positions != "absolute" else count
        first = [part for part in parts if part[-1] < most][: rng.randint(1, 4)]
        # A prefix has one block at least, also where the first is wider than the window.
        first = first or parts[:1]
        parts = [[frame for part in first for frame in part], *parts[len(first) :]]
    kept = sorted(drawn.seen(count))
    rolled = drawn.budget is not None and count > drawn.budget
    again = (
        drawn.blocks(kept, drawn.alone and not rolled)
        if rng.random() < (0.6 if rolled else 0.3)
        else []
    )
    return parts, again


# ---- the same in float64 -------------------------------------------------------------------------


def check_of(drawn: Drawn) -> Check:
    """Return the check of every pass of every block."""

    def check(names: Names) -> None:
        layers = [numbers_of(nnx.state(layer, nnx.Param)) for layer in names["layers"]]
        wants = simulate(drawn, layers, names["clips"])
        loose = (200 if drawn.dtype == "float32" else 12) * EPS[drawn.dtype]
        for i, (got, want) in enumerate(zip(names["outs"], wants, strict=True)):
            bound = np.full(want.shape, loose * max(float(abs(want).max()), 1.0))
            compare(f"outs[{i}]", got, Bounded(want, bound), drawn.dtype, 1.0)

    return check


def simulate(drawn: Drawn, layers: list[Params], clips: np.ndarray) -> list[np.ndarray]:
    """Return the output of each pass, in the order of the source."""
    outs, videos = [], []
    for row, (parts, again) in enumerate(drawn.videos):
        video = Video(drawn, layers)
        for frames in parts:
            outs += [video.run(frames, clips[row, kind])[None] for kind in (0, 1)]
        if again:
            video.kept.clear()
            # The frames of a block are not always neighbours: they see each other all the same.
            outs += [video.block(frames, clips[row, 2, frames])[None] for frames in again]
        videos.append(video)
    for rows in drawn.later:
        for kind in (0, 1):
            each = zip(videos, rows, clips[:, kind], strict=True)
            outs.append(np.stack([video.run(frames, clip) for video, frames, clip in each]))
    return outs


class Video:
    """All keys and values that were computed, by layer and frame."""

    def __init__(self, drawn: Drawn, layers: list[Params]) -> None:
        self.drawn, self.layers = drawn, layers
        self.kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def run(self, frames: Frames, clip: np.ndarray) -> np.ndarray:
        """Run a block, or the blocks of a prefix one after another: [tokens, C]."""
        alone = self.drawn.alone and frames[0] == 0
        parts = self.drawn.blocks(frames, alone)
        return np.concatenate([self.block(part, clip[part]) for part in parts])

    def block(self, frames: Frames, x: np.ndarray) -> np.ndarray:
        """Write frames [F, tokens, C], and attend to their visible frames."""
        d, (f, t, _) = self.drawn, x.shape
        for i, layer in enumerate(self.layers):
            q, k, v = (
                linear(layer, name, x).reshape(f, t, heads, d.h)
                for name, heads in (("to_q", d.heads), ("to_k", d.kv), ("to_v", d.kv))
            )
            self.kept.update({(i, at): (k[n], v[n]) for n, at in enumerate(frames)})
            seen = sorted(at for at in d.seen(frames[-1] + 1) if (i, at) in self.kept)
            place = {at: at if d.positions == "absolute" else n for n, at in enumerate(seen)}
            keys = np.stack([self._rotated(self.kept[i, at][0], place[at]) for at in seen])
            values = np.stack([self.kept[i, at][1] for at in seen])
            queries = np.stack([self._rotated(q[n], place[at]) for n, at in enumerate(frames)])
            x = linear(layer, "to_out", self._attend(queries, keys, values).reshape(f, t, -1))
        return x.reshape(f * t, -1)

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Attend from [F, t, N, H] to [S, t, K, H]."""
        d, (q, k, v) = self.drawn, (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        k, v = (np.repeat(x, d.heads // d.kv, axis=1) for x in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) * d.h**-0.5
        return np.einsum("nts,snh->tnh", softmax(scores, np.ones(scores.shape, bool))[0], v)

    def _rotated(self, x: np.ndarray, place: int) -> np.ndarray:
        """Rotate the tokens of a frame [t, N, H] by their positions, as complex numbers."""
        d = self.drawn
        return rotated(x, place * d.tokens + np.arange(d.tokens), d.theta, d.style)
