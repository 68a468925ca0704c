"""Pictures, figures and the two commands' errors."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common import pictures
from maxattn_examples.digits.drawing import draw, draw_all, draw_prompt
from maxattn_examples.digits.model import WanTransformer
from maxattn_examples.digits.settings import Settings
from maxattn_examples.digits.words import all_prompts
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from tests.examples.conftest import HELD_OUT, ROOT


@pytest.fixture
def model(small: Settings) -> WanTransformer:
    Path(small.training.output_dir).mkdir()
    return WanTransformer(small, rngs=nnx.Rngs(0))


def test_videos_are_ink_and_repeat_with_the_seed(small: Settings, model: WanTransformer):
    prompts = ["a seven moving left", "a two moving up"]
    videos = draw(model, prompts, small)
    assert videos.shape == (2, 5, 12, 12)
    assert (videos.min() >= 0, videos.max() <= 16) == (True, True)
    np.testing.assert_array_equal(videos, draw(model, prompts, small))
    other = small.replace(sampling=small.sampling.replace(seed=1))
    assert (videos != draw(model, prompts, other)).any()


def test_any_number_of_videos_on_any_mesh(small: Settings):
    spread = small.replace(ici_fsdp_parallelism=8)
    on_mesh = WanTransformer(spread, spread.make_mesh(), rngs=nnx.Rngs(0))
    assert draw(on_mesh, ["a seven moving left"] * 3, spread).shape == (3, 5, 12, 12)


@pytest.mark.slow
def test_all_forty_are_drawn_judged_and_written(
    small: Settings, model: WanTransformer, capsys: pytest.CaptureFixture[str]
):
    settings = small.replace(sampling=small.sampling.replace(per_prompt=2))
    found = draw_all(model, settings)
    assert found["all prompts"].videos == 80
    assert found["never trained on"].videos == 2 * len(HELD_OUT)
    assert found["all prompts"].digit < 40, "an untrained model draws no digits"
    folder = Path(settings.training.output_dir)
    figures = json.loads((folder / "figures.json").read_text())
    right = {name: getattr(found["all prompts"], name) for name in ("digit", "direction")}
    assert figures["all prompts"] == {"videos": 80, **right}
    assert figures["real, kept aside"]["videos"] == 4 * 359
    printed = capsys.readouterr().out
    assert "80 videos drawn, 2 a prompt" in printed
    assert str(found["never trained on"]) in printed
    with Image.open(folder / "samples.gif") as gif:
        assert isinstance(gif, GifImageFile) and gif.n_frames == 5


@pytest.mark.slow
def test_one_prompt_is_drawn_and_judged_if_it_is_one_of_the_forty(
    small: Settings, model: WanTransformer, capsys: pytest.CaptureFixture[str]
):
    assert len(draw_prompt(model, "a seven moving left", small)) == 10
    folder = Path(small.training.output_dir)
    assert all((folder / f"a_seven_moving_left.{end}").exists() for end in ("png", "gif"))
    assert "digit" in capsys.readouterr().out
    draw_prompt(model, "three", small)
    assert "digit" not in capsys.readouterr().out


def test_a_contact_sheet_shows_each_frame_in_its_place(tmp_path: Path):
    videos = np.zeros((8, 5, 12, 12))
    videos[:, 2] = 16.0  # the third frame is all ink
    path = pictures.contact_sheet(videos, list(all_prompts())[:8], tmp_path / "sheet.png", scale=4)
    pixels = np.asarray(Image.open(path).convert("L"))
    dark = pixels < 10
    assert dark.sum() == pytest.approx(8 * 48 * 48, rel=0.05)
    columns = np.flatnonzero(dark[16 + 8 :].sum(0) > 40)
    assert columns.min() == 8 + 2 * 50 + 1, "two frames of 48 pixels and their lines come before it"


@pytest.mark.parametrize("count", [1, 3, 200])
def test_a_loss_curve_of_any_length(count: int, tmp_path: Path):
    path = pictures.loss_curve(list(np.geomspace(2.0, 0.2, count)), tmp_path / "loss.png")
    with Image.open(path) as image:
        assert image.size == (840, 480)


MISTAKES = {
    "attention=cudn": ("train", ("override 1: attention: cudn", "did you mean 'cudnn'?")),
    "output_dir=nowhere": ("generate", ("training.output_dir: nowhere", "examples/train.py")),
    "output_dir=nowhere per_prompt=0": ("generate", ("per_prompt: 0", "use 1 or more")),
    "output_dir=nowhere prompt=cat": ("generate", ("prompt: 'cat'", "use the words a, an")),
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_ends_with_a_message(overrides: str, monkeypatch: pytest.MonkeyPatch):
    script, words = MISTAKES[overrides]
    path, config = ROOT / "examples" / f"{script}.py", ROOT / "configs" / "wan_tiny.yml"
    monkeypatch.setattr(sys, "argv", [str(path), str(config), *overrides.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    message = str(ended.value.code)
    assert message.startswith("error: ") and all(word in message for word in words), message
