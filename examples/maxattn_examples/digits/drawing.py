"""Draws videos from trained parameters, writes their pictures and says how good they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from maxattn import sharding
from maxattn_examples.common import hosts, pictures
from maxattn_examples.common.pictures import from_model
from maxattn_examples.common.pipeline_folder import write_json

from . import evaluate, text
from .flow import sample
from .model import WanTransformer
from .settings import Settings
from .words import all_prompts

Videos = Float[np.ndarray, "n F H W"]


def draw(model: WanTransformer, prompts: Sequence[str], settings: Settings) -> Videos:
    """Draw one video for each prompt.

    Args:
        model: trained.
        prompts: any words of the vocabulary, at most four a prompt.
        settings: how to draw.

    Returns:
        Ink from 0 to 16.
    """
    # A batch divides over the mesh: what fills it up is drawn and thrown away.
    ways = sharding.ways("B", sharding.mesh_shape(model.mesh))
    filled = [*prompts, *[""] * (-len(prompts) % ways)]
    key = jax.random.key(settings.sampling.seed)
    noise = jax.random.normal(key, (len(filled), *settings.video_shape))
    videos = sample(model, jnp.asarray(text.encode(filled)), noise, settings.sampling)
    return from_model(hosts.whole(videos))[: len(prompts)]


@sharding.inside_auto_axes()
def draw_all(model: WanTransformer, settings: Settings) -> dict[str, evaluate.Score]:
    """Draw every prompt `per_prompt` times, judge the videos, and write pictures and figures.

    Args:
        model: trained.
        settings: how to draw, and `training.output_dir`.

    Returns:
        Scores by the kind of prompt; empty on every process but the first, which judges.
    """
    each = settings.sampling.per_prompt
    prompts = [prompt for prompt in all_prompts() for _ in range(each)]
    videos = draw(model, prompts, settings)
    if not hosts.is_first():
        return {}
    _write_pictures(videos, settings)
    judge = evaluate.Judge(settings.data)
    found = evaluate.scores(judge, videos, prompts, settings.data.held_out)
    every = found | {"real, kept aside": judge.score_of_real()}
    print("right, as a classifier of real digits and the centre of ink see it")
    print(evaluate.as_text(every))
    figures = Path(settings.training.output_dir) / "figures.json"
    write_json(figures, evaluate.as_values(every))
    return found


def _write_pictures(videos: Videos, settings: Settings) -> None:
    """Write the first video of every prompt."""
    folder, held_out = Path(settings.training.output_dir), settings.data.held_out
    forty, each = list(all_prompts()), settings.sampling.per_prompt
    first = videos[::each]
    print(f"{len(videos)} videos drawn, {each} a prompt; * marks the prompts never trained on")
    print(f"  {pictures.contact_sheet(first, forty, folder / 'contact_sheet.png', held_out)}")
    print(f"  {pictures.moving(first, forty, folder / 'samples.gif', held_out)}")


def draw_prompt(model: WanTransformer, prompt: str, settings: Settings) -> Videos:
    """Draw one prompt `per_prompt` times, write its pictures, and judge one of the forty.

    Args:
        model: trained.
        prompt: any words of the vocabulary, at most four.
        settings: how to draw, and `training.output_dir`.
    """
    folder, held_out = Path(settings.training.output_dir), settings.data.held_out
    prompts = [prompt] * settings.sampling.per_prompt
    videos = draw(model, prompts, settings)
    if not hosts.is_first():
        return videos
    name = prompt.replace(" ", "_") or "no_prompt"
    print(pictures.contact_sheet(videos, prompts, folder / f"{name}.png", held_out, scale=6))
    print(pictures.moving(videos, prompts, folder / f"{name}.gif", held_out, scale=12))
    if prompt in all_prompts():
        print(evaluate.as_text({"right": evaluate.Judge(settings.data).score(videos, prompts)}))
    return videos
