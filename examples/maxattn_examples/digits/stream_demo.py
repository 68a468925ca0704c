"""Streams every prompt from a trained model, measures drift, and shows runs that must fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maxattn_examples.common import pictures
from maxattn_examples.common.pipeline_folder import write_json

from . import drift, stream_pictures, stream_switch
from .drawing import draw as draw_clips
from .drift import Drift
from .evaluate import Judge
from .model import WanTransformer
from .settings import Settings
from .stream_settings import StreamSettings
from .streaming import Videos, stream
from .training import train
from .words import DIGITS, DIRECTIONS, all_prompts, prompt_of

SHOWN = 8  # videos of the pictures, and long videos


def said(settings: Settings) -> StreamSettings:
    """Return how digits are streamed."""
    assert settings.rollout is not None, "the settings have a rollout"
    return settings.rollout


def some_prompts() -> list[str]:
    """Choose prompts in which digits and directions vary."""
    return [prompt_of(n % len(DIGITS), DIRECTIONS[n % len(DIRECTIONS)]) for n in range(SHOWN)]


class Demo:
    """Stream, measure, print and write.

    Args:
        model: trained by forcing.
        settings: of everything.
    """

    def __init__(self, model: WanTransformer, settings: Settings) -> None:
        self.model, self.settings, self.said = model, settings, said(settings)
        self.folder, self.judge = Path(settings.training.output_dir), Judge(settings.data)
        self.found: dict[str, Drift] = {}

    def run(self) -> dict[str, Drift]:
        """Do all of it; return the numbers of every run by its name."""
        each = self.settings.sampling.per_prompt
        prompts = [prompt for prompt in all_prompts() for _ in range(each)]
        self.every_prompt("streamed", prompts)
        self.must_fail()
        if self.said.long_blocks:
            self.long()
        if self.said.switch_block:
            self.switch()
        self.write()
        return self.found

    def measured(self, name: str, videos: Videos, prompts: Sequence[str]) -> Drift:
        """Judge videos, and keep the numbers."""
        size = self.said.frames_per_block
        self.found[name] = drift.measure(self.judge, videos, prompts, size)
        return self.found[name]

    def every_prompt(self, name: str, prompts: Sequence[str]) -> None:
        """Stream the videos that the bars are about."""
        videos = stream(self.model, prompts, self.said.blocks, self.settings)
        found = self.measured(name, videos, prompts)
        print(f"{len(videos)} videos of {videos.shape[1]} frames, {self.said.blocks} blocks")
        print(f"{drift.as_text(found)}\n{drift.bars_as_text(drift.bars(found))}")

    def must_fail(self) -> None:
        """Stream each prompt once in ways that no model is trained for."""
        prompts = list(all_prompts())
        videos = stream(self.model, prompts, self.said.blocks, self.settings, clean_pass=False)
        self._shown("no clean pass", videos, prompts)
        if self.said.contrast_steps:
            model, settings = bidirectional(self.settings)
            whole = draw_clips(model, prompts, settings)
            found = self.measured("bidirectional, whole clips", whole, prompts)
            print(f"a model whose frames all see each other, after {settings.training.steps} steps")
            print(f"as it is trained, clips at once\n{drift.as_text(found)}")
            videos = stream(model, prompts, self.said.blocks, settings)
            self._shown("bidirectional, streamed", videos, prompts)

    def _shown(self, name: str, videos: Videos, prompts: Sequence[str]) -> None:
        found = self.measured(name, videos, prompts)
        print(f"must fail: {name}\n{drift.as_text(found, self._some())}")
        print(drift.bars_as_text(drift.bars(found)))

    def _some(self) -> list[int]:
        """Choose a few blocks of a table."""
        last = self.said.blocks - 1
        return sorted({0, min(1, last), min(5, last), last})

    def long(self) -> None:
        """Stream a few prompts for very long, and write the GIF."""
        prompts, blocks = some_prompts(), self.said.long_blocks
        videos = stream(self.model, prompts, blocks, self.settings)
        found = self.measured("long", videos, prompts)
        chosen = sorted({0, *range(9, blocks, 10), blocks - 1})
        print(f"{len(videos)} videos of {videos.shape[1]} frames")
        print(drift.as_text(found, chosen))
        print(f"  {pictures.moving(videos, prompts, self.folder / 'long.gif')}")

    def switch(self) -> None:
        """Change the prompt of every prompt's video in the middle, to another digit."""
        at, before = self.said.switch_block, list(all_prompts())
        after = stream_switch.other_digits(before)
        blocks = at + max(at, stream_switch.SOON)
        videos = stream(self.model, before, blocks, self.settings, switch=(at, after))
        size = self.said.frames_per_block
        found = stream_switch.measure(self.judge, videos, before, after, size, at)
        self.found |= {"switched": found.asked, "switched: first digit": found.first}
        print(f"{len(videos)} videos whose prompt changes to another digit before block {at + 1}")
        print(f"{found}\n{drift.bars_as_text(found.bars)}")
        shown = [before.index(prompt) for prompt in some_prompts()]
        labels = [[prompts[i] for i in shown] for prompts in (before, after)]
        where, then = self.folder / "switch.gif", (at * size, labels[1])
        print(f"  {pictures.moving(videos[shown], labels[0], where, then=then)}")

    def write(self) -> None:
        """Write the figures, and quality against block."""
        figures, at = self.folder / "figures.json", self.said.switch_block
        write_json(figures, drift.as_values(self.found))
        print(f"  {stream_pictures.quality(self.found, self.folder / 'quality.png', at)}")


def draw(model: WanTransformer, prompt: str | None, settings: Settings) -> None:
    """Stream all prompts and measure them, or one prompt for as long as the long videos.

    Args:
        model: trained.
        prompt: any words of the vocabulary, at most four; None for all forty.
        settings: how.
    """
    if prompt is None:
        Demo(model, settings).run()
        return
    prompts, how = [prompt] * settings.sampling.per_prompt, said(settings)
    videos = stream(model, prompts, how.long_blocks or how.blocks, settings)
    path = Path(settings.training.output_dir) / f"{prompt.replace(' ', '_') or 'no_prompt'}.gif"
    print(pictures.moving(videos, prompts, path, scale=12))
    if prompt in all_prompts():
        print(
            drift.as_text(
                drift.measure(Judge(settings.data), videos, prompts, how.frames_per_block)
            )
        )


def bidirectional(settings: Settings) -> tuple[WanTransformer, Settings]:
    """Train the same model on the same clips with one time a clip, every frame seeing the others.

    Args:
        settings: of the model that is trained by forcing.
    """
    training = settings.training
    own = training.replace(
        steps=said(settings).contrast_steps,
        forcing="none",
        context_noise=0.0,
        context_dropout=0.0,
        prompt_switches=0.0,
        sink_distance=0,
        output_dir=str(Path(training.output_dir) / "bidirectional"),
    )
    once = settings.sampling.replace(per_prompt=1)
    settings = settings.replace(training=own, sampling=once)
    return train(settings)[0], settings
