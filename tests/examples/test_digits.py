"""The demo in one file: settings, data, a short run on one device and on eight, and the judge."""

from __future__ import annotations

import re
import runpy
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from maxattn.errors import ConfigError, InputError
from tests.examples.conftest import ROOT

import digits  # isort: skip

CONFIG = ROOT / "configs" / "wan_tiny.yml"
TINY = ["dim=32", "layers=1", "heads=4", "dim_head=8", "ffn_dim=32", "batch_size=8"]
SHORT = [*TINY, "steps=3", "num_inference_steps=2", "per_prompt=1"]
fitted_classifier = cache(digits.fitted_classifier)


def settings_of(*overrides: str) -> Any:
    return digits.Settings.from_yaml(CONFIG, overrides)


# ---- settings ------------------------------------------------------------------------------------


def test_the_shipped_file_names_every_key_and_holds_out_four_digits_and_directions():
    shipped = settings_of()
    for section in ("model", "data", "training", "sampling"):
        found = getattr(shipped, section)
        assert found.model_fields_set == set(type(found).model_fields), section
    pairs = [digits.PROMPTS[prompt] for prompt in shipped.data.held_out]
    assert all(len(set(of_all)) == 4 for of_all in zip(*pairs, strict=True))


REFUSED = {
    "stepss=20": ("stepss: 20", "did you mean 'training.steps'?"),
    "attention=cudn": ("attention: cudn", "did you mean 'cudnn'?"),
    "seed=1": ("training and sampling both have a key 'seed'",),
    "steps=0": ("training.steps: 0",),
    "patch=[1, 5, 4]": ("model.patch: [1, 5, 4]", "5 frames of 12 x 12", "divisors"),
    "dim_head=25": ("model.dim_head: 25", "multiple of 2"),
    "held_out=[a sevn moving left]": ("a sevn moving left", "mean 'a seven moving left'?"),
    "learning_rate=nan": ("training.learning_rate", "a finite number"),
    "canvas=7": ("data.canvas: 7",),
}


@pytest.mark.parametrize("override", REFUSED)
def test_wrong_settings_are_refused_with_a_remedy(override: str):
    with pytest.raises(ConfigError) as error:
        settings_of(override)
    assert all(word in str(error.value) for word in REFUSED[override]), str(error.value)


@pytest.mark.parametrize(
    ("override", "word"),
    [("prompt=a cat moving left", "'cat'"), ("batch_size=9", "8 devices"), ("stepss=1", "stepss")],
)
def test_a_mistake_ends_with_a_message(override: str, word: str, tmp_path: Path, monkeypatch):
    program = str(ROOT / "examples" / "digits.py")
    words = [*SHORT, f"output_dir={tmp_path}", "ici_fsdp_parallelism=8", override]
    monkeypatch.setattr(sys, "argv", [program, str(CONFIG), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program, run_name="__main__")
    assert str(ended.value.code).startswith("error: ") and word in str(ended.value.code)
    assert not list(tmp_path.iterdir()), "nothing was trained"


# ---- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", digits.STEPS)
def test_each_frame_is_the_last_one_moved_a_pixel(direction: str):
    scan, data = digits.load("train")[0][3], settings_of("lane_spread=2").data
    for lane in range(5):
        video = digits.move(scan, direction, lane, data)
        for before, after in pairwise(video):
            np.testing.assert_array_equal(after, np.roll(before, digits.STEPS[direction], (0, 1)))
            assert after.sum() == scan.sum(), "no ink leaves the canvas"


def test_held_out_prompts_are_never_trained_on_and_test_scans_are_others():
    data = settings_of().data
    videos, prompts = digits.videos_of("train", data)
    assert set(prompts) == set(digits.PROMPTS) - set(data.held_out)
    assert len(videos) == len(prompts)
    train, test = ({scan.tobytes() for scan in digits.load(x)[0]} for x in ("train", "test"))
    assert (len(train), len(test)) == (1438, 359) and not train & test


def test_prompts_are_numbered_and_the_empty_one_is_padding_alone():
    words = digits.encode(["a seven moving left", "three", ""])
    assert [digits.VOCABULARY[word] for word in words[0]] == ["a", "seven", "moving", "left"]
    assert (words > 0).sum(-1).tolist() == [4, 1, 0]
    for prompt in ("a cat moving left", "<pad>", "a seven moving left left"):
        with pytest.raises(InputError, match="at most 4 words"):
            digits.encode([prompt])


# ---- a run ---------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit the classifier once, and let it judge a tenth of the real digits."""
    videos_of, tenth = digits.videos_of, slice(None, None, 10)

    def some(split: Any, data: Any) -> Any:
        found = videos_of(split, data)
        return tuple(x[tenth] for x in found) if split == "test" else found

    monkeypatch.setattr(digits, "videos_of", some)
    monkeypatch.setattr(digits, "fitted_classifier", fitted_classifier)


@pytest.mark.usefixtures("quick")
def test_a_short_run_over_eight_devices_draws_and_one_device_draws_the_same_again(tmp_path, capsys):
    where = ["ici_data_parallelism=1", f"output_dir={tmp_path}"]
    spread = settings_of(*SHORT, *where, "ici_fsdp_parallelism=2", "ici_context_parallelism=4")
    settings = settings_of(*SHORT, f"output_dir={tmp_path}")
    digits.main(spread, only_draw=False)
    said = capsys.readouterr().out
    assert re.search(r"all prompts +digit +\d+/40 .*direction +\d+/40", said)
    assert re.search(r"never trained on +digit +\d+/4 ", said)
    sheet = np.asarray(Image.open(tmp_path / "contact_sheet.png"), np.float32)
    with Image.open(tmp_path / "samples.gif") as moving:
        assert isinstance(moving, GifImageFile) and moving.n_frames == 5
    assert (tmp_path / "loss.png").exists()
    digits.main(settings, only_draw=True)
    again = np.asarray(Image.open(tmp_path / "contact_sheet.png"), np.float32)
    np.testing.assert_allclose(sheet, again, atol=2)  # sums over devices are rounded elsewhere
    one = settings.replace(sampling=settings.sampling.replace(prompt="three", per_prompt=3))
    digits.main(one, only_draw=True)
    assert (tmp_path / "three" / "contact_sheet.png").exists()
    assert "digit" not in capsys.readouterr().out.splitlines()[-2], "no prompt of the forty"


def test_weights_of_another_model_are_refused(tmp_path: Path):
    settings = settings_of(*SHORT, f"output_dir={tmp_path}", "per_prompt=0")
    with pytest.raises(Exception, match="safetensors"):
        digits.main(settings, only_draw=True)


# ---- the judge -----------------------------------------------------------------------------------


def test_the_judge_is_right_on_real_digits_and_sees_wrong_ones():
    data = settings_of("held_out=[]").data
    videos, prompts = digits.videos_of("test", data)
    videos, machine = videos.astype(np.float64), fitted_classifier()
    digit, direction = digits.right(machine, videos, prompts)
    assert digit.mean() > 0.99 and direction.all()
    other = {(d, way): prompt for prompt, (d, way) in digits.PROMPTS.items()}
    turned = {"left": "right", "right": "left", "up": "down", "down": "up"}
    pairs = [digits.PROMPTS[prompt] for prompt in prompts]
    wrong = [other[(d + 1) % 10, turned[way]] for d, way in pairs]
    digit, direction = digits.right(machine, videos, wrong)
    assert digit.mean() < 0.01 and not direction.any()
