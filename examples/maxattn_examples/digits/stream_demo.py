"""Stream every prompt from a trained model, judge the videos, and show a run that must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from maxattn import sharding
from maxattn.weights.replacing import replacing
from maxattn_examples.common import hosts, pictures
from maxattn_examples.common.pipeline_folder import write_json
from maxattn_examples.common.settings import MOST
from maxattn_examples.stream import Denoising, Rollout
from maxattn_examples.wan.model import WanTransformer3D

from . import torus
from .drift import SOON, Drift, Switched, TorusJudge, Videos, bars_as_text
from .settings import Settings
from .words import ALL, DIGITS, TORUS

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
    judge = TorusJudge(settings.data.canvas, settings.data.speed)
    folder, found = Path(settings.training.output_dir), {}
    folder.mkdir(parents=True, exist_ok=True)

    prompts = [prompt for prompt in every for _ in range(each)]
    streamed = judge.measure(stream(model, prompts, how.blocks, settings), prompts, size)
    found["streamed"] = streamed
    print(f"{len(prompts)} videos of {how.blocks * size} frames, {how.blocks} blocks")
    print(f"{streamed.table()}\n{bars_as_text(streamed.bars)}")

    noisy = settings.replace(rollout=how.replace(clean_pass=False, context_noise=0.0))
    worse = judge.measure(stream(model, every, how.blocks, noisy), every, size)
    found["no clean pass"] = worse
    some = sorted({0, min(1, how.blocks - 1), how.blocks - 1})
    print(f"must fail: no clean pass\n{worse.table(some)}\n{bars_as_text(worse.bars)}")

    if blocks := how.long_blocks:
        prompts = _of_all_kinds()
        videos = stream(model, prompts, blocks, settings)
        found["long"] = judge.measure(videos, prompts, size)
        print(f"{len(videos)} videos of {videos.shape[1]} frames")
        print(found["long"].table(sorted({0, *range(9, blocks, 10), blocks - 1})))
        print(f"  {pictures.moving(videos, prompts, folder / 'long.gif')}")
    if how.switch_block:
        found |= _switched(model, judge, settings, folder)
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
    """Plot one panel per measure and one line per run; mark where the prompt changes."""
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
