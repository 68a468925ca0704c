"""Lists of times, and few-step models: the settings that result, and those that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from maxattn_examples.flux.settings import SIZES as FLUX_SIZES
from maxattn_examples.flux.settings import SamplingSettings as Flux
from maxattn_examples.sample.distilled import table
from maxattn_examples.samplers import Schedule
from maxattn_examples.samplers.flow import shifted
from maxattn_examples.samplers.sampler import RENOISING, Sampler
from maxattn_examples.sdxl.settings import SamplingSettings as Sdxl
from maxattn_examples.wan.settings import SamplingSettings as Wan

from maxattn.errors import ConfigError
from tests.golden_text import check_refused

KINDS: dict[str, Any] = {"wan": Wan, "sdxl": Sdxl, "flux": Flux}
LIST, FAST = (1000, 750, 500, 250), (1000, 757, 522)
# The times and the sampler of each, as the model's own repository takes them.
MOVED = [1000, 937.5, 833.3333, 625]
TIMES = {
    "lightx2v": ("flow_euler", MOVED),
    "self_forcing": ("flow_lcm", MOVED),
    "fastwan": ("flow_lcm", [1000, 757, 522]),
    "causvid": ("flow_lcm", [999, 934, 862, 756, 603, 410, 250, 140, 74]),
    "dmd2": ("lcm", [999, 749, 499, 249]),
    "dmd2_1step": ("lcm", [399]),
    "lcm_lora": ("lcm", [999, 759, 499, 259]),
    "lightning": ("euler", [999, 749, 499, 249]),
    "hyper_sd": ("ddim", [999, 749, 499, 249]),
    "schnell": ("flow_euler", [1000, 750, 500, 250]),
}


def sampler_of(settings: Any) -> Sampler:
    if isinstance(settings, Flux):
        return settings.sampler_of(None, FLUX_SIZES["flux.1-dev"], 4096)
    return settings.sampler_of(None)


def schedule_of(settings: Any) -> Schedule:
    return sampler_of(settings).schedule(settings.num_inference_steps)


@pytest.mark.parametrize("name", table())
def test_a_name_sets_sampler_times_and_guidance(name: str) -> None:
    kind, row = KINDS[table()[name].family], table()[name]
    for steps in row.steps:
        settings = kind(distilled=name, num_inference_steps=steps)
        schedule = schedule_of(settings)
        assert len(schedule.times) == steps
        assert (schedule.fresh is not None) == (settings.sampler in RENOISING)
    settings = kind(distilled=name)
    assert settings.num_inference_steps == row.steps[0] and not settings.guided
    assert kind(**settings.resolved()) == settings, "what is printed is read again"
    if name in TIMES:
        found = sampler_of(settings).name, schedule_of(settings).times
        assert found[0] == TIMES[name][0]
        np.testing.assert_allclose(found[1], TIMES[name][1], rtol=1e-6)


def test_rcm_begins_with_noise_times_its_first_sigma() -> None:
    turns = np.array([np.arctan(80), 1.5, 1.4, 1.0])
    schedule = schedule_of(Wan(distilled="rcm"))
    sigmas = np.sin(turns) / (np.sin(turns) + np.cos(turns))
    np.testing.assert_allclose(schedule.times, 1000 * sigmas, rtol=1e-6)
    np.testing.assert_allclose(schedule.noise_scale, sigmas[0], rtol=1e-6)
    printed = str(sampler_of(Wan(distilled="rcm")))
    assert "flow_lcm, re-noising, times 987.7 933.8 852.9 609, first noise times 0.9877" in printed


def test_lightning_begins_with_noise_of_the_largest_sigma() -> None:
    scale = schedule_of(Sdxl(distilled="lightning")).noise_scale
    assert float(scale) == pytest.approx(14.6146, 1e-5)


def test_the_one_list_is_written_in_several_ways() -> None:
    """A list with the same final sigmas counts as the model's own."""
    ways: tuple[dict[str, Any], ...] = (
        {"timesteps": LIST, "warped": False},
        {"timesteps": (*LIST, 0), "warped": False},
        {"sigmas": (1.0, 0.75, 0.5, 0.25), "warped": False},
        {"timesteps": (1000, 937.5, 833.3, 625), "warped": True},
    )
    wanted = schedule_of(Wan(distilled="lightx2v"))
    for how in ways:
        found = schedule_of(Wan(distilled="lightx2v", **how))
        np.testing.assert_allclose(found.times, wanted.times, atol=0.1)
        shift = None if how["warped"] else 5.0
        alone = schedule_of(Wan(sampler="flow_euler", timestep_shift=shift, **how))
        np.testing.assert_array_equal(alone.predict, found.predict)


def test_a_list_is_moved_by_the_shift_or_not() -> None:
    how: dict[str, Any] = {"sampler": "flow_euler", "timesteps": LIST}
    moved = schedule_of(Wan(**how, warped=False, timestep_shift=3.0)).times
    final = schedule_of(Wan(**how, warped=True)).times
    np.testing.assert_allclose(final, LIST)
    np.testing.assert_allclose(moved, 1000 * shifted(np.array(LIST) / 1000, 3.0))
    by_size = schedule_of(Flux(timesteps=LIST, warped=False)).times
    assert by_size[1] > 900, "moved by the picture's tokens"


CFG = {"true_cfg_scale": 2.0}
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "rising": (Wan, {"timesteps": LIST[::-1], "warped": True}),
    "empty": (Sdxl, {"timesteps": ()}),
    "clean_end_alone": (Wan, {"timesteps": (0,), "warped": True}),
    "clean_sigma_alone": (Sdxl, {"sigmas": (0.0,), "num_inference_steps": 1}),
    "two_lists": (Wan, {"timesteps": LIST, "sigmas": (1.0, 0.5), "warped": True}),
    "wrong_length": (Sdxl, {"timesteps": (999, 499), "num_inference_steps": 4}),
    "warped_unsaid": (Flux, {"sigmas": (1.0, 0.5)}),
    "warped_without_a_list": (Wan, {"warped": False}),
    "unknown": (Wan, {"distilled": "lightx2w"}),
    "of_another_family": (Wan, {"distilled": "dmd2"}),
    "guidance_and_all": (
        Wan,
        {
            "distilled": "lightx2v",
            "sampler": "flow_lcm",
            "timestep_shift": 3.0,
            "num_inference_steps": 50,
            "guidance_scale": 5.0,
            "guidance_scale_2": 3.0,
        },
    ),
    "other_list": (Wan, {"distilled": "lightx2v", "timesteps": (1000, 500), "warped": False}),
    "own_list_not_warped": (Wan, {"distilled": "lightx2v", "timesteps": LIST, "warped": True}),
    "final_list_moved": (Wan, {"distilled": "fastwan", "timesteps": FAST, "warped": False}),
    "shift_of_fastwan": (Wan, {"distilled": "fastwan", "timestep_shift": 9.0}),
    "shift_of_a_final_list": (Flux, {"sigmas": (1.0, 0.5), "warped": True, "timestep_shift": 3.0}),
    "default_list_of_lcm": (Sdxl, {"distilled": "dmd2", "timesteps": (999, 759, 499, 259)}),
    "list_of_lightning": (Sdxl, {"distilled": "lightning", "timesteps": (999, 749, 499, 249)}),
    "steps_of_lightning": (Sdxl, {"distilled": "lightning", "num_inference_steps": 6}),
    "guidance_of_lcm_lora": (Sdxl, {"distilled": "lcm_lora", "guidance_scale": 7.5}),
    "guidance_of_schnell": (Flux, {"distilled": "schnell", "guidance_scale": 3.5, **CFG}),
    "guidance_of_hyper_flux": (Flux, {"distilled": "hyper_flux", "guidance_scale": 2.0}),
    # What is known once there is a sampler.
    "above_noise": (Wan, {"sigmas": (1.2, 0.5), "warped": True, "sampler": "flow_lcm"}),
    "beyond_the_times": (Sdxl, {"timesteps": (1000, 500)}),
    "between_the_times": (Sdxl, {"timesteps": (999, 499.5), "sampler": "lcm"}),
    "sigmas_of_lcm": (Sdxl, {"sigmas": (14.6, 1.0), "sampler": "lcm"}),
    "sigmas_of_flow": (Sdxl, {"sigmas": (80.0, 1.0)}),
    "list_of_unipc": (Wan, {"timesteps": LIST, "warped": True}),
    "list_of_ddim": (Sdxl, {"timesteps": (999, 499), "sampler": "ddim"}),
    "many_steps_of_lcm": (Sdxl, {"num_inference_steps": 60, "sampler": "lcm"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    kind, values = REFUSED[case]
    check_refused(f"distilled/{case}", ConfigError, lambda: schedule_of(kind(**values)))
