"""Stream every prompt from a trained model, judge the videos, and show a run that must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from maxattn import sharding
from maxattn.weights.replacing import replacing
from maxattn_examples.common import hosts, pictures
from maxattn_examples.common.pipeline_folder import write_json
from maxattn_examples.common.settings import MOST
from maxattn_examples.stream import Denoising, Rollout
from maxattn_examples.wan.model import WanTransformer3D

from . import judge, torus
from .scenes import Size
from .settings import Settings
from .torus import INK, SIDE, Scans
from .words import ALL, DIGITS, STEPS, TORUS

SHOWN = 8  # videos of the pictures, and long videos
FURTHER = 3  # digits from the first prompt's to the second one's
LABELS = {
    "digit": "right digits", "direction": "right directions",
    "phase": "pixels off its place", "ink": "ink / ink of scans",
}  # fmt: skip


@sharding.inside_auto_axes()
def demo(model: WanTransformer3D, settings: Settings) -> dict[str, Drift]:
    """Stream, judge, print and write; return the drift of every run by name."""
    hosts.alone("the demo of streaming")
    how, each = settings.rollout, settings.sampling.per_prompt
    every, size = list(ALL), how.frames_per_block
    of_torus = TorusJudge(settings.data.canvas, settings.data.speed)
    folder, found = Path(settings.training.output_dir), {}
    folder.mkdir(parents=True, exist_ok=True)

    prompts = [prompt for prompt in every for _ in range(each)]
    streamed = of_torus.measure(stream(model, prompts, how.blocks, settings), prompts, size)
    found["streamed"] = streamed
    print(f"{len(prompts)} videos of {how.blocks * size} frames, {how.blocks} blocks")
    print(f"{streamed.table()}\n{bars_as_text(streamed.bars)}")

    noisy = settings.replace(rollout=how.replace(clean_pass=False, context_noise=0.0))
    worse = of_torus.measure(stream(model, every, how.blocks, noisy), every, size)
    found["no clean pass"] = worse
    some = sorted({0, min(1, how.blocks - 1), how.blocks - 1})
    print(f"must fail: no clean pass\n{worse.table(some)}\n{bars_as_text(worse.bars)}")

    if blocks := how.long_blocks:
        prompts = _of_all_kinds()
        videos = stream(model, prompts, blocks, settings)
        found["long"] = of_torus.measure(videos, prompts, size)
        print(f"{len(videos)} videos of {videos.shape[1]} frames")
        print(found["long"].table(sorted({0, *range(9, blocks, 10), blocks - 1})))
        print(f"  {pictures.moving(videos, prompts, folder / 'long.gif')}")
    if how.switch_block:
        found |= _switched(model, of_torus, settings, folder)
    write_json(folder / "figures.json", {name: drift.values for name, drift in found.items()})
    print(f"  {_plot(found, folder / 'quality.png', how.switch_block)}")
    return found


def draw(model: WanTransformer3D, prompt: str, settings: Settings) -> None:
    """Stream one prompt, as many blocks as for the long videos."""
    prompts, how = [prompt] * max(1, settings.sampling.per_prompt), settings.rollout
    videos = stream(model, prompts, how.long_blocks or how.blocks, settings)
    path = Path(settings.training.output_dir) / f"{prompt.replace(' ', '_') or 'no_prompt'}.gif"
    print(pictures.moving(videos, prompts, path, scale=12))


def stream(
    model: WanTransformer3D,
    prompts: Sequence[str],
    blocks: int,
    settings: Settings,
    switch: tuple[int, Sequence[str]] | None = None,
) -> Videos:
    """Stream a video for each prompt.

    Args:
        model: trained with forcing.
        prompts: of `TORUS`.
        blocks: number of blocks per video.
        switch: the block before which the prompts change, and the prompts from then on.

    Returns:
        Ink from 0 to 16.
    """
    rollout = rollout_of(model, settings)
    reel = rollout.begin(told(model, prompts, rollout.how.rows), len(prompts))
    made: list[Any] = []
    for number in range(blocks):
        if switch is not None and number == switch[0]:
            reel = rollout.switch(reel, told(model, switch[1], rollout.how.rows))
        latents, reel = rollout.block(reel)
        made.append(np.asarray(latents))
    return torus.to_ink(np.concatenate(made, axis=1))


def rollout_of(model: WanTransformer3D, settings: Settings) -> Rollout:
    """Return the rollout: Euler steps, a clean pass, guidance as batch rows."""
    said, canvas, seed = settings.rollout, settings.data.canvas, settings.sampling.seed
    how = Denoising(
        said.denoising_steps,
        said.warp_steps,
        said.timestep_shift,
        "flow_euler",
        said.context_noise / MOST,
        said.clean_pass,
        settings.sampling.guidance_scale,
    )
    side = canvas // torus.SQUARE
    tokens, block = (canvas // torus.TOKEN) ** 2, said.frames_per_block

    def call(model: WanTransformer3D, x: Any, t: Any, kv: Any, **seen: Any) -> Any:
        places = torus.places(x.shape[1], block, canvas)
        places = jnp.broadcast_to(places, (len(x), *places.shape)).astype(x.dtype)
        return model(jnp.concatenate([x, places], -1), t, kv=kv, **seen)

    sides = (side, side, torus.SQUARE**2)
    return Rollout(model, said.stream(tokens), sides, how, seed=seed, call=call)


def told(model: WanTransformer3D, prompts: Sequence[str], rows: int) -> Any:
    """Encode prompts; with guidance, put as many empty ones before them."""
    return model.encode(jnp.asarray(TORUS.encode([*[""] * len(prompts) * (rows - 1), *prompts])))


def _of_all_kinds() -> list[str]:
    """Choose prompts with different digits and directions."""
    return [TORUS.prompt_of([(n % len(DIGITS), n % 4)]) for n in range(SHOWN)]


def _switched(
    model: WanTransformer3D, judge: TorusJudge, settings: Settings, folder: Path
) -> dict[str, Drift]:
    """Stream every prompt, and change it to another digit in the middle."""
    at, size, before = settings.rollout.switch_block, settings.rollout.frames_per_block, list(ALL)
    after = [TORUS.prompt_of([((digit + FURTHER) % 10, way)]) for digit, way in ALL.values()]
    videos = stream(model, before, at + max(at, SOON), settings, (at, after))
    found = Switched.of(judge, videos, (before, after), at, size)
    print(f"{len(videos)} videos whose prompt changes to another digit before block {at + 1}")
    print(f"{found.asked.table()}\n{bars_as_text(found.bars)}")
    shown = [before.index(prompt) for prompt in _of_all_kinds()]
    labels = [[prompts[i] for i in shown] for prompts in (before, after)]
    path, then = folder / "switch.gif", (at * size, labels[1])
    print(f"  {pictures.moving(videos[shown], labels[0], path, then=then)}")
    return {"switched": found.asked, "switched: first digit": found.first}


def _plot(found: Mapping[str, Drift], path: Path, switch: int) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    for panel, (name, label) in zip(figure.subplots(2, 2).flat, LABELS.items(), strict=True):
        for run, drift in found.items():
            numbers = drift.values[name]
            panel.plot(range(1, len(numbers) + 1), numbers, label=run, lw=1.2)
        if switch:
            panel.axvline(switch + 0.5, ls=":", color="black", label="another prompt")
        panel.set(xlabel="block", ylabel=label, xscale="log")
        panel.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    with replacing(path) as beside:
        figure.savefig(beside, dpi=110)
    return path


# ---- what streamed videos show, block by block ---------------------------------------------------
# Whether a streamed video still shows the digit of its prompt:
#
# digit      share of the block's frames in which the classifier names it
# direction  whether its mean movement per frame rounds to the prompt's
# phase      pixels between its place and the one that the first frame and the prompt imply
# ink        its ink, as a share of the mean ink of scans of the digit

Videos = Float[np.ndarray, "n F H W"]
HALF = 0.5  # pixels a frame: movements nearer to the prompt's than this round to it
FIRST, LAST, DIRECTION, INK_OFF = 0.97, 0.90, 0.98, 0.10
SOON, SHARE, AFTER = 3, 0.90, 0.95  # blocks until a new digit is there; its bars
HEAD = "  block   digit  direction  phase     ink"


@dataclass(frozen=True)
class Drift:
    """One number per block, over all videos.

    Args:
        digit, direction: shares of correct frames, and of correct videos.
        phase: mean distance in pixels from the place that the first frame and the prompt imply.
        ink: share of the scans' mean ink.
    """

    digit: tuple[float, ...]
    direction: tuple[float, ...]
    phase: tuple[float, ...]
    ink: tuple[float, ...]

    @property
    def values(self) -> dict[str, tuple[float, ...]]:
        """The four tuples by name."""
        return asdict(self)

    @property
    def bars(self) -> dict[str, bool]:
        """Return which bars the videos pass; a failure of any is visible to a viewer."""
        return {
            f"digit in block 1 at least {FIRST:.0%}": self.digit[0] >= FIRST,
            f"digit in the last block at least {LAST:.0%}": self.digit[-1] >= LAST,
            f"direction in every block at least {DIRECTION:.0%}": min(self.direction) >= DIRECTION,
            f"ink in every block within {INK_OFF:.0%}": all(
                abs(x - 1) <= INK_OFF for x in self.ink
            ),
        }

    def table(self, blocks: Sequence[int] | None = None) -> str:
        """Format a table of some blocks, by default all."""
        chosen = range(len(self.digit)) if blocks is None else blocks
        rows = (
            f"  {b + 1:>5}  {self.digit[b]:>6.1%}  {self.direction[b]:>9.1%}"
            f"  {self.phase[b]:>5.2f}  {self.ink[b]:>6.1%}"
            for b in chosen
        )
        return "\n".join([HEAD, *rows])


class TorusJudge:
    """Judge streamed videos.

    Args:
        canvas: pixels along a side.
        speed: pixels that a digit moves in a frame.
    """

    def __init__(self, canvas: int, speed: int) -> None:
        self.speed, self.size, scans = speed, Size(1, canvas, canvas, SIDE), Scans.of("train")
        self.layers = judge.fitted(scans, SIDE)
        ink = INK * scans.ink.sum((-1, -2))
        ends = zip(scans.first, scans.first[1:], strict=False)
        self.ink = np.array([ink[first:last].mean() for first, last in ends])

    def measure(self, videos: Videos, prompts: Sequence[str], block: int) -> Drift:
        """Judge videos, ink from 0 to 16, in blocks of `block` frames."""
        digits, ways = (np.array(x) for x in zip(*(ALL[p] for p in prompts), strict=True))
        steps, logs = self.speed * STEPS[ways].astype(np.float64), self.named(videos)
        off, ink = _off(videos, steps), videos.sum((-1, -2)) / self.ink[digits][:, None]
        by_block = [
            (
                np.mean(logs[:, own].sum(1).argmax(-1) == digits),
                np.mean(_moves_right(videos, own, steps)),
                off[:, own].mean(),
                ink[:, own].mean(),
            )
            for at in range(0, videos.shape[1], block)
            for own in [slice(at, at + block)]
        ]
        return Drift(*(tuple(map(float, numbers)) for numbers in zip(*by_block, strict=True)))

    def named(self, videos: Videos) -> Float[np.ndarray, "n F 10"]:
        """Return the log-probabilities of the ten digits in every frame."""
        ink = torus.unrolled(videos)[:, None] / INK
        total, at = ink.sum((-1, -2)) + 1e-6, np.arange(self.size.height)
        middles = [jnp.asarray((ink.sum(axis) * at).sum(-1) / total) for axis in (-1, -2)]
        cuts = judge.cut(jnp.asarray(ink), middles, self.size)
        return np.asarray(judge.name(self.layers, cuts).logs[:, 0])


def _moves_right(
    videos: Videos, own: slice, steps: Float[np.ndarray, "n 2"]
) -> Bool[np.ndarray, " n"]:
    """Check whether each video moves in its prompt's direction, from the frame before the block."""
    centres = torus.centre(videos[:, max(own.start - 1, 0) : own.stop])
    moved = torus.apart(np.diff(centres, axis=1), videos.shape[-1]).mean(axis=1)
    return (np.abs(moved - steps) < HALF).all(-1)


def _off(videos: Videos, steps: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n F"]:
    """Return each digit's distance from the place that the first frame and the prompt imply."""
    centres, frames = torus.centre(videos), np.arange(videos.shape[1])
    wanted = centres[:, :1] + frames[:, None] * steps[:, None]
    return np.linalg.norm(torus.apart(centres - wanted, videos.shape[-1]), axis=-1)


# ---- videos whose prompt changes to another digit ------------------------------------------------


@dataclass(frozen=True)
class Switched:
    """The drift of videos before and after a change of prompt to another digit.

    Two scans on one path have different centres of ink. So in the block after the change the
    direction is computed from that block's frames alone, and phase includes the difference.

    Args:
        at: number of blocks before the change.
        first, second: drift from the first prompts, and from the second ones, in all blocks.
    """

    at: int
    first: Drift
    second: Drift

    @classmethod
    def of(
        cls, told: TorusJudge, videos: Videos, prompts: Sequence[Sequence[str]], at: int, block: int
    ) -> Switched:
        """Judge videos by the prompts before and after the change."""
        first, second = (told.measure(videos, some, block) for some in prompts)
        alone = told.measure(videos[:, at * block :], prompts[1], block)
        ways = (*second.direction[:at], *alone.direction)
        return cls(at, first, Drift(**second.values | {"direction": ways}))

    @property
    def asked(self) -> Drift:
        """The drift in each block from the prompt that the block was sampled with."""
        pairs = zip(self.first.values.items(), self.second.values.values(), strict=True)
        return Drift(**{key: x[: self.at] + y[self.at :] for (key, x), y in pairs})

    @property
    def bars(self) -> dict[str, bool]:
        """Return which bars the videos pass."""
        before, late = self.first.digit[: self.at], self.second.digit[self.at + SOON - 1 :]
        ways = self.second.direction[self.at :]
        return {
            f"first digit before the switch at least {SHARE:.0%}": min(before) >= SHARE,
            f"second digit from block {SOON} after it at least {SHARE:.0%}": min(late) >= SHARE,
            f"direction after it at least {AFTER:.0%}": min(ways) >= AFTER,
        }


def bars_as_text(bars: dict[str, bool]) -> str:
    """Format which bars are passed."""
    return "\n".join(f"  {'pass' if ok else 'FAIL'}  {name}" for name, ok in bars.items())
