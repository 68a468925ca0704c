"""A video model of moving digits, from data to picture: train it, draw with it, judge what it drew.

    python examples/digits.py configs/wan_tiny.yml
    # any key of the file can be changed: the kernel, the devices, the number of steps
    python examples/digits.py configs/wan_tiny.yml attention=dot_product steps=20
    # draw again with the weights of an earlier run
    python examples/digits.py configs/wan_tiny.yml --draw prompt="a seven moving left"

The data are scikit-learn's handwritten digits, which move across a small canvas. The model is a
Wan-style diffusion transformer (https://arxiv.org/abs/2503.20314) of maxattn's modules, trained by
flow matching (https://arxiv.org/abs/2210.02747). A classifier of real digits judges the samples.

Axes: B batch, F frames, H rows, W columns, T tokens, D width, S words of a prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Gt, Lt, MultipleOf
from einops import rearrange
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt8
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import maxattn as ma
from maxattn.config import Section
from maxattn.errors import ConfigError, InputError, MaxattnError, did_you_mean
from maxattn.modules import KV, GatedBranch, ModulationRow, adaptive_norm, gated_sum

SIDE = 8  # pixels along a side of a scanned digit
INK = 16.0  # the darkest pixel of a scan
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # rows, columns
PROMPTS = {
    f"a{'n' * (digit == 8)} {DIGITS[digit]} moving {direction}": (digit, direction)
    for digit, direction in product(range(10), STEPS)
}
VOCABULARY = ("<pad>", "a", "an", "moving", *STEPS, *DIGITS)
LENGTH = 4  # words of a prompt
TIME = 64  # cosines and sines of a time
LEAST = 0.05  # below this time, errors of the clean video are not amplified further in the velocity

Video = Float[Array, "B F H W"]
Drawn = Float[np.ndarray, "B F H W"]
Text = tuple[list[KV], ma.masks.Mask]


def main(settings: Settings, only_draw: bool) -> None:
    """Train, or load the weights of an earlier run; draw; judge; write pictures."""
    began, mesh, folder = time.perf_counter(), settings.make_mesh(), settings.training.output_dir
    asked, each = settings.sampling.prompt, settings.sampling.per_prompt
    prompts = [prompt for prompt in (PROMPTS if asked is None else [asked]) for _ in range(each)]
    words = encode(prompts)  # refuses an unknown word before anything is trained
    model = Transformer(settings, mesh, rngs=nnx.Rngs(settings.training.seed))
    if only_draw:
        ma.weights.load_diffusers(model, folder, mesh=mesh)
    else:
        ma.sharding.place(model, mesh)
        model = train(model, settings, mesh)
        ma.weights.save_diffusers(model, folder)
    trained = time.perf_counter()
    if prompts:
        videos = draw(model, words, settings, mesh)
        if set(prompts) <= set(PROMPTS):
            print_scores(videos, prompts, settings.data)
        some = slice(None, None, each if asked is None else 1)  # the first one of each prompt
        path = Path(folder, (asked or "").replace(" ", "_"))
        write_pictures(videos[some], prompts[some], settings.data.held_out, path)
    print(f"training {trained - began:.0f} s, the rest {time.perf_counter() - trained:.0f} s")


# ---- settings: the keys of configs/wan_tiny.yml, beside maxattn's own ----------------------------

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]


class Model(Section):
    dim: Count = 96
    layers: Count = 4
    heads: Count = 4
    dim_head: Annotated[int, Ge(6), MultipleOf(2)] = 24
    ffn_dim: Count = 384
    patch: tuple[Count, Count, Count] = (1, 6, 6)


class Data(Section):
    frames: Annotated[int, Ge(2)] = 5
    canvas: Annotated[int, Ge(SIDE)] = 12
    lane_spread: Whole = 0
    held_out: tuple[str, ...] = ()


class Training(Section):
    steps: Count = 1800
    batch_size: Count = 64
    learning_rate: Positive = 4e-3
    warmup_steps: Whole = 50
    weight_decay: NotNegative = 0.01
    ema_decay: Share = 0.995
    prompt_dropout: Share = 0.1
    timestep_shift: Positive = 3.0
    seed: Whole = 0
    output_dir: str = "out/wan_tiny"


class Sampling(Section):
    num_inference_steps: Count = 20
    guidance_scale: NotNegative = 3.0
    timestep_shift: Positive = 4.0
    per_prompt: Whole = 10
    prompt: str | None = None
    seed: Whole = 0


class Settings(ma.AttentionConfig):
    """maxattn's keys (kernel, strategy, mesh), and the sections of this program."""

    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    sampling: Sampling = Sampling()

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Yield an error for each setting that does not fit the others."""
        yield from super().contradictions(values)
        model, data = values["model"], values["data"]
        if any(np.array([data.frames, data.canvas, data.canvas]) % model.patch):
            rule = f"patches must tile {data.frames} frames of {data.canvas} x {data.canvas} pixels"
            yield ConfigError("model.patch", list(model.patch), rule, "use divisors of these")
        for prompt in set(data.held_out) - set(PROMPTS):
            remedy = did_you_mean(prompt, PROMPTS) or 'write it as "a seven moving left"'
            yield ConfigError("data.held_out", prompt, "it must be one of the 40 prompts", remedy)


# ---- data: scans of digits that move across a canvas ---------------------------------------------


def load(split: str) -> tuple[UInt8[np.ndarray, "n 8 8"], Int[np.ndarray, " n"]]:
    """Load the scans and labels of a split; every fifth scan is in the split "test"."""
    scans, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % 5 == 4) == (split == "test")
    return scans[chosen].reshape(-1, SIDE, SIDE).astype(np.uint8), labels[chosen]


def move(scan: np.ndarray, direction: str, lane: int, data: Data) -> UInt8[np.ndarray, "F H W"]:
    """Draw a digit that moves from edge to edge, `lane` pixels from the upper or left one."""
    video = np.zeros((data.frames, data.canvas, data.canvas), np.uint8)
    places = np.linspace(0, data.canvas - SIDE, data.frames).round().astype(int)
    rows, columns = STEPS[direction]
    for frame, place in zip(video, places if rows + columns > 0 else places[::-1], strict=True):
        row, column = (place, lane) if rows else (lane, place)
        frame[row : row + SIDE, column : column + SIDE] = scan
    return video


def videos_of(split: str, data: Data) -> tuple[UInt8[np.ndarray, "n F H W"], list[str]]:
    """Draw each scan of a split in all directions and lanes; leave out the held-out prompts."""
    prompts = {pair: prompt for prompt, pair in PROMPTS.items() if prompt not in data.held_out}
    room, spread = data.canvas - SIDE, data.lane_spread
    lanes = range(max(0, room // 2 - spread), min(room, room // 2 + spread) + 1)
    shown = [
        (move(scan, direction, lane, data), prompts[label, direction])
        for (scan, label), direction, lane in product(zip(*load(split), strict=True), STEPS, lanes)
        if (label, direction) in prompts
    ]
    return np.stack([video for video, _ in shown]), [prompt for _, prompt in shown]


def encode(prompts: Sequence[str]) -> Int[np.ndarray, "B S"]:
    """Number the words of prompts; zeros fill short ones, and an empty prompt is all zeros."""
    numbers = np.zeros((len(prompts), LENGTH), np.int32)
    for row, prompt in zip(numbers, prompts, strict=True):
        words = prompt.lower().split()
        if unknown := [word for word in words if word not in VOCABULARY[1:]] or words[LENGTH:]:
            rule = f"it has at most {LENGTH} words, all of {', '.join(VOCABULARY[1:])}"
            remedy = did_you_mean(unknown[0], VOCABULARY[1:]) or f"leave out '{unknown[0]}'"
            raise InputError("prompt", repr(prompt), rule, remedy)
        row[: len(words)] = [VOCABULARY.index(word) for word in words]
    return numbers


# ---- the model -----------------------------------------------------------------------------------


class Transformer(nnx.Module):
    """Predict the velocity of noisy videos, given their times and prompts.

    The layers predict the clean video, which is simpler than noise; its velocity follows from it.
    """

    def __init__(self, settings: Settings, mesh: Mesh, *, rngs: nnx.Rngs) -> None:
        sizes, canvas, (f, h, w) = settings.model, settings.data.canvas, settings.model.patch
        self.grid = {"F": settings.data.frames // f, "H": canvas // h, "W": canvas // w}
        self.patch, pixels = {"f": f, "h": h, "w": w}, f * h * w
        self.sizes, self.mesh = sizes, mesh
        self.patches = nnx.Linear(pixels, sizes.dim, rngs=rngs)
        # In pure noise all tokens are alike, and RoPE encodes only their distances. Without
        # this table, which marks the first frame, the model learns left and right late.
        table = jax.random.normal(rngs.params(), (*self.grid.values(), sizes.dim))
        self.position = nnx.Param(0.5 * table.reshape(-1, sizes.dim))
        self.words = nnx.Embed(len(VOCABULARY), sizes.dim, rngs=rngs)
        self.time = nnx.Linear(TIME, sizes.dim, rngs=rngs)
        self.time_out = nnx.Linear(sizes.dim, sizes.dim, rngs=rngs)
        self.modulation = nnx.Linear(sizes.dim, 6 * sizes.dim, rngs=rngs)
        self.blocks = nnx.List([Block(settings, mesh, rngs=rngs) for _ in range(sizes.layers)])
        self.norm, self.table = norm(sizes.dim, rngs), modulation_table(2, sizes.dim, rngs)
        zeros = nnx.initializers.zeros
        self.out = nnx.Linear(sizes.dim, pixels, kernel_init=zeros, rngs=rngs)

    def encode(self, words: Int[Array, "B S"]) -> Text:
        """Compute the keys and values of prompts for all blocks, once for all steps of sampling."""
        states, lengths = self.words(words), (words > 0).sum(-1).astype(jnp.int32)
        keys = [block.attn2.compute_kv(states) for block in self.blocks]
        return keys, ma.masks.KeyPadding(lengths)

    def __call__(self, noisy: Video, t: Float[Array, " B"], text: Text) -> Video:
        """Predict the velocity; t is 0 for clean videos and 1 for noise, text is from `encode`."""
        x = rearrange(noisy, "B (F f) (H h) (W w) -> B (F H W) (f h w)", **self.patch)
        x = self.patches(x) + self.position[...]
        angles = 1000 * t[:, None] * jnp.geomspace(1, 1e-4, TIME // 2)
        e = self.time(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1))
        e = self.time_out(nnx.silu(e))[:, None, None]
        modulation = rearrange(self.modulation(nnx.silu(e)), "B F 1 (R D) -> B F R D", R=6)
        rotary = ma.rope_3d(self.sizes.dim_head, *self.grid.values())
        keys, mask = text
        for block, kv in zip(self.blocks, keys, strict=True):
            x = block(x, modulation, rotary, kv, mask)
        shift, scale = (ModulationRow(self.table[...] + e, row) for row in range(2))
        x = self.out(adaptive_norm(x, self.norm, scale, shift, mesh=self.mesh)[1])
        clean = rearrange(x, "B (F H W) (f h w) -> B (F f) (H h) (W w)", **self.grid, **self.patch)
        return (noisy - clean) / jnp.maximum(t, LEAST)[:, None, None, None]


class Block(nnx.Module):
    """Self-attention, cross-attention to the prompt and a feed-forward layer."""

    def __init__(self, settings: Settings, mesh: Mesh, *, rngs: nnx.Rngs) -> None:
        sizes = settings.model
        how: dict[str, Any] = {"heads": sizes.heads, "dim_head": sizes.dim_head, "bias": True}
        how |= {"qk_norm": "rms_norm_across_heads", "config": settings, "mesh": mesh, "rngs": rngs}
        self.attn1 = ma.FlaxAttention(sizes.dim, **how)
        self.attn2 = ma.CrossAttention(sizes.dim, **how)
        up, down = ma.sharding.on_axes("fsdp", "tensor"), ma.sharding.on_axes("tensor", "fsdp")
        self.up = nnx.Linear(sizes.dim, sizes.ffn_dim, kernel_metadata=up, rngs=rngs)
        self.down = nnx.Linear(sizes.ffn_dim, sizes.dim, kernel_metadata=down, rngs=rngs)
        self.norms = nnx.List([norm(sizes.dim, rngs) for _ in range(3)])
        self.table, self.mesh = modulation_table(6, sizes.dim, rngs), mesh

    def __call__(self, x: Array, modulation: Array, rotary: ma.Rotary, kv: KV, mask: Any) -> Array:
        """Run the layers; adaptive_norm adds each layer's result before it norms the next input."""
        row = partial(ModulationRow, modulation, base=self.table[...])
        normed = partial(adaptive_norm, mesh=self.mesh)
        x, y = normed(x, self.norms[0], row(1), row(0))
        branch = GatedBranch(self.attn1(y, rotary), row(2))
        x, y = normed(x, self.norms[1], branch=branch)
        branch = GatedBranch(self.attn2(y, kv=kv, mask=mask))
        x, y = normed(x, self.norms[2], row(4), row(3), branch=branch)
        y = self.down(nnx.gelu(self.up(y), approximate=True))
        return gated_sum(x, GatedBranch(y, row(5)))


def norm(dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(dim, epsilon=1e-6, use_bias=False, use_scale=False, rngs=rngs)


def modulation_table(rows: int, dim: int, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (1, 1, rows, dim)))


# ---- training: flow matching, AdamW, a running average of the weights ----------------------------


def shifted(t: Array, shift: float) -> Array:
    """Move times towards the noise if shift is above 1."""
    return shift * t / (1 + (shift - 1) * t)


def flow_loss(model: Transformer, video: Array, words: Array, key: Array, how: Training) -> Array:
    """Return the mean squared error of the predicted velocity.

    A noisy video is x = (1 - t) video + t noise, whose velocity dx/dt is noise - video.
    """
    for_times, for_noise, for_words = jax.random.split(key, 3)
    t = jax.nn.sigmoid(jax.random.normal(for_times, (len(video),)))
    t = shifted(t, how.timestep_shift)
    noise, share = jax.random.normal(for_noise, video.shape), t[:, None, None, None]
    # Guidance needs predictions for the empty prompt.
    empty = jax.random.bernoulli(for_words, how.prompt_dropout, (len(words), 1))
    text = model.encode(jnp.where(empty, 0, words))
    velocity = model((1 - share) * video + share * noise, t, text)
    return jnp.mean((velocity - (noise - video)) ** 2)


def train(model: Transformer, settings: Settings, mesh: Mesh) -> Transformer:
    """Train the model; return the running average of its weights."""
    how, ways = settings.training, ma.sharding.ways("B", ma.sharding.mesh_shape(mesh))
    if how.batch_size % ways:
        rule = f"each of the {ways} devices along data and fsdp takes equally many videos"
        raise ConfigError("training.batch_size", how.batch_size, rule, f"use {ways} or {2 * ways}")
    last, peak = max(how.steps, how.warmup_steps + 1), how.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, how.warmup_steps, last, 0.01 * peak)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=how.weight_decay)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    average, optimizer = nnx.clone(model), nnx.Optimizer(model, clipped, wrt=nnx.Param)
    ma.sharding.place(optimizer, mesh)

    @nnx.jit
    def step(model, optimizer, average, video, words, number):
        key = jax.random.fold_in(jax.random.key(how.seed), number)
        loss, gradient = nnx.value_and_grad(flow_loss)(model, video, words, key, how)
        optimizer.update(model, gradient)
        # A young average forgets faster, or it would remember where training began.
        keep = jnp.minimum(how.ema_decay, (1 + number) / (10 + number))
        old, new = nnx.state(average), nnx.state(model)
        nnx.update(average, jax.tree.map(lambda a, b: keep * a + (1 - keep) * b, old, new))
        return loss

    run: Any = nnx.cached_partial(step, model, optimizer, average)
    videos, prompts = videos_of("train", settings.data)
    words, losses, random = encode(prompts), [], np.random.default_rng(how.seed)
    for number in range(how.steps):
        chosen = random.integers(len(videos), size=how.batch_size)
        batch = videos[chosen].astype(np.float32) / (INK / 2) - 1, words[chosen]
        losses.append(run(*on_devices(batch, mesh), number))
        if (number + 1) % 100 == 0:
            loss = np.mean(losses[-100:])
            print(f"step {number + 1} of {how.steps}: loss {loss:.4f}", flush=True)
    figure, labels = Figure(layout="constrained"), {"xlabel": "step", "ylabel": "loss"}
    figure.subplots(subplot_kw=labels).semilogy(np.array(losses))
    (folder := Path(how.output_dir)).mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "loss.png", dpi=120)
    return average


def on_devices(arrays: Iterable[np.ndarray], mesh: Mesh) -> list[Array]:
    """Split arrays over the devices of data and fsdp, by their first axis."""
    return [jax.device_put(x, ma.sharding.batch_sharding(mesh, x.ndim)) for x in arrays]


# ---- sampling: Euler steps from noise to video, with guidance ------------------------------------


@partial(nnx.jit, static_argnames="how")
def sample(model: Transformer, words: Array, noise: Video, how: Sampling) -> Video:
    """Walk from noise to videos, away from the predictions for the empty prompt."""
    guided = how.guidance_scale != 1
    text = model.encode(jnp.concatenate([words, 0 * words]) if guided else words)
    times = shifted(jnp.linspace(1, 0, how.num_inference_steps + 1), how.timestep_shift)

    def euler(x: Array, ends: Array) -> tuple[Array, None]:
        rows = jnp.concatenate([x, x]) if guided else x
        velocity = model(rows, jnp.full(len(rows), ends[0]), text)
        if guided:
            velocity, without = jnp.split(velocity, 2)
            velocity = without + how.guidance_scale * (velocity - without)
        return x + (ends[1] - ends[0]) * velocity, None

    return jax.lax.scan(euler, noise, jnp.stack([times[:-1], times[1:]], -1))[0]


def draw(model: Transformer, words: np.ndarray, settings: Settings, mesh: Mesh) -> Drawn:
    """Draw a video for each prompt; return ink from 0 to 16."""
    data, how, count = settings.data, settings.sampling, len(words)
    # Each device has equally many videos: those of empty prompts at the end are thrown away.
    ways = ma.sharding.ways("B", ma.sharding.mesh_shape(mesh))
    words = np.pad(words, ((0, -count % ways), (0, 0)))
    shape = (len(words), data.frames, data.canvas, data.canvas)
    noise = np.asarray(jax.random.normal(jax.random.key(how.seed), shape))
    walk: Any = partial(sample, how=how)
    videos = np.asarray(walk(model, *on_devices((words, noise), mesh)))[:count]
    return np.clip((videos + 1) * (INK / 2), 0, INK)


# ---- judging: a classifier that never saw the model, and the way that the ink moves --------------


def print_scores(videos: Drawn, prompts: Sequence[str], data: Data) -> None:
    """Print how many videos show the digit, and the direction, of their prompts."""
    machine, never = fitted_classifier(), np.isin(prompts, data.held_out)
    real, of_real = videos_of("test", data.replace(held_out=()))
    groups = {
        "all prompts": (videos, prompts),
        "never trained on": (videos[never], [p for p in prompts if p in data.held_out]),
        "real, kept aside": (real.astype(np.float64), of_real),
    }
    print("right, as a classifier of real digits and the centre of ink see it")
    for name, (shown, said) in groups.items():
        if said:
            both = right(machine, shown, said)
            counts = (f"{x.sum():>5}/{len(x)} {x.mean():6.1%}" for x in both)
            print("  {:<18}digit {}   direction {}".format(name, *counts))


def fitted_classifier() -> SVC:
    """Fit a support vector machine to the scans that the model learns from.

    The centre of ink may round to a neighbouring pixel, so each scan is learned at five places.
    """
    scans, labels = load("train")
    padded = np.pad(scans, ((0, 0), (SIDE, SIDE), (SIDE, SIDE))).astype(np.float64)
    near = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    cuts = np.concatenate([around_ink(padded, off) for off in near])
    machine = SVC(C=10.0, gamma=0.001)  # pyright: ignore[reportArgumentType]
    return machine.fit(cuts, np.tile(labels, len(near)))


def right(machine: SVC, videos: Drawn, prompts: Sequence[str]) -> Bool[np.ndarray, "2 B"]:
    """Return whether each video shows the digit, and the direction, of its prompt."""
    digits, directions = zip(*(PROMPTS[prompt] for prompt in prompts), strict=True)
    scores = machine.decision_function(around_ink(np.concatenate(videos)))
    named = scores.reshape(*videos.shape[:2], 10).sum(1).argmax(-1)
    centre = centre_of_ink(videos)
    along = (centre[:, -1] - centre[:, 0]) @ np.array(list(STEPS.values())).T
    return np.stack([named == digits, np.array(list(STEPS))[along.argmax(-1)] == directions])


def around_ink(frames: Float[np.ndarray, "n H W"], off: Any = (0, 0)) -> np.ndarray:
    """Cut 8 x 8 pixels around the centre of ink, displaced by `off`."""
    corners = np.round(centre_of_ink(frames) - (SIDE - 1) / 2).astype(int) + np.array(off)
    corners = corners.clip(0, np.array(frames.shape[1:]) - SIDE)
    cuts = [f[r : r + SIDE, c : c + SIDE] for f, (r, c) in zip(frames, corners, strict=True)]
    return np.reshape(cuts, (len(frames), SIDE * SIDE))


def centre_of_ink(frames: Float[np.ndarray, "... H W"]) -> Float[np.ndarray, "... 2"]:
    """Return the row and column of the centre of ink, or the middle of an empty frame."""
    ink = frames + 1e-6
    rows = (ink.sum(-1) * np.arange(frames.shape[-2])).sum(-1)
    columns = (ink.sum(-2) * np.arange(frames.shape[-1])).sum(-1)
    return np.stack([rows, columns], -1) / ink.sum((-1, -2))[..., None]


# ---- pictures ------------------------------------------------------------------------------------


def write_pictures(videos: Drawn, prompts: Sequence[str], starred: Any, folder: Path) -> None:
    """Draw videos frame by frame (contact_sheet.png), and moving (samples.gif)."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = [[enlarged(frame) for frame in video] for video in videos]
    strips = [np.concatenate(frames, 1) for frames in cells]
    page(prompts, strips, starred).save(folder / "contact_sheet.png")
    first, *others = [page(prompts, frames, starred) for frames in zip(*cells, strict=True)]
    # The last frame stays longer, so that the jump back to the first one is seen.
    how: dict[str, Any] = {"append_images": others, "duration": [200] * len(others) + [600]}
    first.save(folder / "samples.gif", save_all=True, loop=0, **how)
    print(f"pictures in {folder}: contact_sheet.png, samples.gif; * marks held-out prompts")


def enlarged(frame: Float[np.ndarray, "H W"], scale: int = 4) -> UInt8[np.ndarray, "h w"]:
    """Draw dark ink on white, smoothly enlarged, with a thin line around it."""
    image = Image.fromarray(np.round(255 * (1 - frame / INK)).astype(np.uint8))
    size = (scale * image.width, scale * image.height)
    return np.pad(np.asarray(image.resize(size, Image.Resampling.BICUBIC)), 1, constant_values=225)


def page(names: Sequence[str], cells: Sequence[Any], starred: Sequence[str]) -> Image.Image:
    """Lay out pictures in four columns, each below its name; starred names are red."""
    font, (high, wide) = ImageFont.load_default(size=12), cells[0].shape
    wide, high = max(wide, *(round(font.getlength(name)) + 10 for name in names)) + 8, high + 24
    sheet = Image.new("RGB", (4 * wide + 8, -(-len(cells) // 4) * high + 8), "white")
    for number, (name, cell) in enumerate(zip(names, cells, strict=True)):
        x, y = 8 + number % 4 * wide, 8 + number // 4 * high
        text, colour = (f"{name} *", "crimson") if name in starred else (name, "dimgray")
        ImageDraw.Draw(sheet).text((x, y), text, fill=colour, font=font)
        sheet.paste(Image.fromarray(cell), (x, y + 16))
    return sheet


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("config", help="a YAML file, such as configs/wan_tiny.yml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--draw", action="store_true", help="draw with weights of an earlier run")
    found = parser.parse_intermixed_args()
    try:
        main(Settings.from_yaml(found.config, found.overrides), found.draw)
    except MaxattnError as error:
        raise SystemExit(f"error: {error}") from None
