"""Further columns: distances of decoded pictures, and scores of digits by a judge.

Sources: Wang et al. 2004 (SSIM), https://doi.org/10.1109/TIP.2003.819861; Zhang et al. 2018
(LPIPS), https://arxiv.org/abs/1801.03924.
"""

# lpips and torch are optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn_examples.compare.report import frechet
from maxattn_examples.digits import scenes
from maxattn_examples.digits.judge import BETTER, Judge, Scored
from maxattn_examples.digits.task import ClipSamplingTask, size_of_clips
from maxattn_examples.digits.torus import Scans
from maxattn_examples.digits.words import SCENES
from maxattn_examples.sample.inputs import Paths, Rows, noise
from maxattn_examples.sample.task import SamplingTask
from maxattn_examples.samplers import keys_of

from .report import DENSE, Row, Samples, Score
from .runner import Clips
from .ways import REAL

Pixels = UInt8[np.ndarray, "... H W 3"]
SIGMA, WIDTH = 1.5, 11  # of the window of SSIM
SMALL = (0.01 * 255) ** 2, (0.03 * 255) ** 2
MOST_FRAMES = 16  # of a video that LPIPS looks at, spread over it
CLIPS = 8  # of digits that are drawn at once
LONGEST = 60  # characters of a folder's name, which may have 255 bytes
SEED = 1_000_003  # of prompts and noise; training counts its clips from another one
SHARES = ("digit", "identity", "path", "stray")
WORDS = (
    "digit: the classifier names it; likelihood, margin: logarithms of its probability; identity,"
    " kept: a digit that was hidden, before and after; path: it moves as told; stray: ink of other"
    " colours; FD: Frechet distance of the classifier's features; flicker: difference of"
    " neighbouring frames, over the dense clip's, in the median."
)


class Scores:
    """The columns beside drift: of decoded samples with --out, of a judge with --clips.

    Args:
        clips: number of prompts of digits; None for the user's prompts.
        first: number of the first of these prompts.

    Attributes:
        facts: facts about the judge, for the report.
        words: explains the columns, for the report.
        rows: the scores of real clips.
    """

    def __init__(self, task: SamplingTask, paths: Paths, clips: int | None, first: int) -> None:
        self.digits = None if clips is None else Digits(task, first, clips)
        self.decoded = None if paths.out is None else Decoded(paths.model, paths.out)
        self.words = "" if self.digits is None else WORDS
        self.rows, self.facts = [], {}
        if self.digits is not None:
            accuracy, prompts = self.digits.judge.accuracy, self.digits.scene.prompts()
            print(f"classifier: {accuracy:.1%} of scans that it did not learn from")
            self.rows = [self.digits.real_row()]
            self.facts = {"classifier": round(accuracy, 5), "prompts": prompts}

    def clips(self, batch: int) -> Clips | None:
        """Return prompts of digits with noise; None if the user gave prompts."""
        return None if self.digits is None else self.digits.clips(batch)

    def add(self, task: SamplingTask, name: str, latents: Samples) -> dict[str, Score]:
        """Score samples, channels last; the first call must have the dense ones."""
        judged = {} if self.digits is None else self.digits.score(name, latents)
        shown = {} if self.decoded is None else self.decoded.score(task, name, latents)
        return judged | shown


def batch_of(found: argparse.Namespace, task: SamplingTask, wanted: int) -> int:
    """Return how many clips to draw at once; the user gave `wanted` prompts.

    Raises:
        ConfigErrors: options do not fit each other or the model.
    """
    problems = []
    if found.clips is not None and not isinstance(task, ClipSamplingTask):
        rule = "the judge scores the model that configs/digits_large.yml trains"
        problems.append(ConfigError("--clips", found.clips, rule, "leave it out, and give prompts"))
    if found.clips is None and found.first is not None:
        rule = "it is the number of the first of --clips"
        problems.append(ConfigError("--first", found.first, rule, "give --clips N"))
    count = wanted if found.clips is None else found.clips
    batch = found.batch or (count if found.clips is None else min(CLIPS, count))
    if count < 1 or batch < 1 or count % batch:
        setting, value = ("--batch", batch) if found.clips is None else ("--clips", count)
        rule = f"the clips, {count}, are drawn in whole batches, of {batch}"
        fits = max((n for n in range(1, abs(batch)) if count % n == 0), default=1)
        problems.append(ConfigError(setting, value, rule, f"give --batch {fits}"))
    if problems:
        raise ConfigErrors(problems)
    return batch


class Digits:
    """Prompts of digits that no model was trained on, and the judge of their samples."""

    def __init__(self, task: Any, first: int, count: int) -> None:
        self.task, self.first, self.count = task, first, count
        self.size = size_of_clips(task.settings, task.sizes)
        self.judge = Judge(self.size)
        self.scene, real = self._drawn(first)
        self.real = self.judge.score(real, self.scene)
        self.dense: Scored | None = None

    def _drawn(self, first: int) -> tuple[scenes.Scene, scenes.Clips]:
        scans = Scans.of("test")
        scene = scenes.draw(SEED, jnp.arange(first, first + self.count), scans, self.size)
        return scene, scenes.render(scene, scenes.scans_here(scans), self.size)

    def clips(self, batch: int) -> Clips:
        """Return the prompts with noise."""
        empty = SCENES.encode([""]).repeat(self.count, axis=0)
        arrays = {"text": SCENES.encode(self.scene.prompts()), "negative_text": empty}
        rows, (channels, *sizes) = Rows(self.first + self.count, 1, 1, 1), self.task.latents
        start = noise(SEED, rows, (*sizes, channels))[self.first :]
        return Clips(arrays, start, keys_of(self.task.settings.sampling.seed, self.count), batch)

    def real_row(self) -> Row:
        """Return the scores of real clips for the prompts, compared with other real clips."""
        scene, real = self._drawn(2**20 + self.first)
        fd = frechet(self.real.features, self.judge.score(real, scene).features)
        return Row(REAL, scores={**_columns(self.real), "FD to real": Score(fd, "{:.3g}")})

    def score(self, name: str, latents: Samples) -> dict[str, Score]:
        """Score the samples of a way of sampling; the first call must have the dense ones."""
        scored = self.judge.score(scenes.of_model(jnp.asarray(latents, jnp.float32)), self.scene)
        dense = self.dense = scored if name == DENSE or self.dense is None else self.dense
        rates = scored.scores["flicker"] / dense.scores["flicker"]
        others = {"FD to real": self.real, "FD to dense": dense}
        far = {k: Score(frechet(scored.features, x.features), "{:.3g}") for k, x in others.items()}
        return {**_columns(scored), **far, "flicker": Score(np.median(rates), clips=rates)}


def _columns(scored: Scored) -> dict[str, Score]:
    found = {name: scored.scores[name] for name in BETTER}
    forms = {name: "{:.2%}" if name in SHARES else "{:.3f}" for name in found}
    return {name: Score(x.mean(), forms[name], BETTER[name], x) for name, x in found.items()}


class Decoded:
    """Pictures or videos, decoded into one folder per way of sampling."""

    def __init__(self, model: Path, out: Path) -> None:
        self.model, self.out, self.ways = model, out, 0
        self.dense: list[Pixels] = []

    def score(self, task: SamplingTask, name: str, latents: Samples) -> dict[str, Score]:
        """Decode samples; return their distances from the dense ones, which the first call has."""
        shown = task.pixels(self.model, np.moveaxis(latents, -1, 1))
        folder = re.sub(r"[^\w.=-]+", "_", f"{self.ways:02} {name}")[:LONGEST]
        print(*task.write(shown, self.out / folder), sep="\n")
        self.ways += 1
        if name == DENSE:
            self.dense = shown
            return {}
        kinds: dict[str, Any] = {"PSNR of pixels": psnr, "SSIM": ssim}
        kinds |= {"LPIPS": lpips} if find_spec("lpips") is not None else {}
        pairs = list(zip(shown, self.dense, strict=True))
        found = {name: np.array([kind(a, b) for a, b in pairs]) for name, kind in kinds.items()}
        return {name: Score(np.median(x), clips=x) for name, x in found.items()}


def psnr(a: Pixels, b: Pixels) -> float:
    """Return the peak signal-to-noise ratio of pixels, in dB; 100 where they are equal."""
    error = np.square(a.astype(np.float64) - b).mean()
    return 100.0 if error == 0 else float(10 * np.log10(255.0**2 / error))


def ssim(a: Pixels, b: Pixels) -> float:
    """Return the structural similarity of pixels, as a mean over frames and colours."""
    from scipy.ndimage import gaussian_filter

    sigma = (0,) * (a.ndim - 3) + (SIGMA, SIGMA, 0)
    radius = (WIDTH - 1) / 2 / SIGMA

    def smooth(x: np.ndarray) -> Float[np.ndarray, "... H W 3"]:
        return gaussian_filter(x, sigma, truncate=radius)

    x, y = (np.asarray(n, np.float64) for n in (a, b))
    mean_x, mean_y = smooth(x), smooth(y)
    var_x, var_y = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2
    both = smooth(x * y) - mean_x * mean_y
    c1, c2 = SMALL
    top = (2 * mean_x * mean_y + c1) * (2 * both + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def lpips(a: Pixels, b: Pixels) -> float:
    """Return the learned distance of pictures, as a mean over frames."""
    import torch
    from lpips import LPIPS

    def frames(x: np.ndarray) -> torch.Tensor:
        x = x.reshape(-1, *x.shape[-3:])
        some = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_FRAMES)).astype(int))
        return torch.tensor(x[some]).permute(0, 3, 1, 2).float() / 127.5 - 1

    with torch.no_grad():
        return float(LPIPS(net="alex", verbose=False)(frames(a), frames(b)).mean())
