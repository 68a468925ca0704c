"""Our samplers equal diffusers' schedulers step by step: times, model inputs and samples."""

from __future__ import annotations

import json
from doctest import DocTestFinder, DocTestRunner
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.flux.settings import SIZES as FLUX_SIZES
from maxattn_examples.flux.settings import SamplingSettings
from maxattn_examples.sample.scheduler import NAMES, read
from maxattn_examples.samplers import Schedule, ddim, euler, flow_euler, sample, start, step, unipc
from maxattn_examples.samplers.flow import euler_over
from maxattn_examples.samplers.sampler import Given
from safetensors.numpy import load_file

from maxattn.errors import ConfigError, InputError
from tests.closeness import distance
from tests.examples.parity import part
from tests.fixtures import make_samplers as made
from tests.golden_text import check_refused
from tests.packages import skip_without

CASES = made.cases()
KINDS = sorted({name.partition(".")[0] for name in CASES})
# Where sigma is 4096, diffusers' float32 keeps three digits of x - x0; in float64 it gives our
# numbers to 5e-7. So it is with alpha_bar of few thousandths in LCM.
TOLERANCE = {"euler_v": 5e-4, "euler_linspace": 2e-5, "lcm_v": 2e-5}
OF_SIGMAS = ("euler_sigmas", "euler_v_sigmas")
NAMES_OF = ("dev", "schnell")
FLUX, FLOW = made.FLUX, "FlowMatchEulerDiscreteScheduler"
WAN = {"_class_name": "UniPCMultistepScheduler", "_diffusers_version": "0.33.0"}
WAN |= made.WAN | {"flow_shift": 3.0}


def names_of(kind: str) -> list[str]:
    """Name the cases of a kind, one for each number of steps."""
    return [name for name in CASES if name.partition(".")[0] == kind]


def folder_of(path: Path, **said: object) -> Path:
    """Write a folder with a scheduler's config."""
    (path / "scheduler").mkdir(exist_ok=True)
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(said))
    return path


def schedule_of(case: made.Case, path: Path) -> Schedule:
    """Make a case's schedule from the file that diffusers would write."""
    family = "flow" if NAMES[case.kind] in ("flow_euler", "flow_lcm", "unipc") else "discrete"
    folder = folder_of(path, _class_name=case.kind, **case.options)
    sampler = read(folder, "even_flow" if case.tokens else family, given=Given.of(case.given))
    return sampler.of_tokens(case.tokens).schedule(case.steps)


def compare(name: str, path: Path, noise: np.ndarray, theirs: dict[str, np.ndarray]) -> None:
    """Compare every step of a case with diffusers', to 5e-6 of the scale."""
    schedule = schedule_of(CASES[name], path)
    kind = name.partition(".")[0]
    # Flux's pipeline computes its sigmas in float32, and Euler the logarithms of sigmas.
    rtol = 1e-5 if kind in OF_SIGMAS else 4e-7 if CASES[name].tokens else 2e-7
    np.testing.assert_allclose(schedule.times, theirs["times"], rtol=rtol)
    tolerance = TOLERANCE.get(kind, 5e-6)

    plain = jax.tree.map(np.asarray, schedule)
    state, off = start(plain, jnp.asarray(noise)), []
    for i in range(CASES[name].steps):
        seen = plain.scale[i] * state.x
        fresh = theirs["fresh"][i] if "fresh" in theirs else None
        state = step(plain, i, state, lambda x, t: made.model(x, t, jnp), fresh)
        for got, want in ((seen, theirs["seen"][i]), (state.x, theirs["x"][i])):
            off.append(distance(got, want))
            assert off[-1] <= tolerance, f"{name}, step {i}: {off[-1]:.1e} of the scale"
        if fresh is not None:  # near the noise a step enlarges the error of the one before 15 times
            state = state._replace(x=jnp.asarray(theirs["x"][i]))
    print(f"{name}: at most {max(off):.1e} of the scale")
    if CASES[name].steps != 4 or "fresh" in theirs:
        return
    scanned = jax.jit(lambda n: sample(lambda x, t: made.model(x, t, jnp), n, schedule))(
        jnp.asarray(noise)
    )
    np.testing.assert_allclose(scanned, state.x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_diffusers(kind: str, tmp_path: Path) -> None:
    theirs = load_file(Path(made.__file__).parent / "diffusers_samplers.safetensors")
    for name in names_of(kind):
        compare(name, tmp_path, theirs["noise"], part(theirs, f"{name}."))


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_diffusers_live(kind: str, tmp_path: Path) -> None:
    skip_without("torch", "diffusers")
    noise = made.first()
    for name in names_of(kind):
        theirs = {key: value.numpy() for key, value in made.run(CASES[name], noise).items()}
        compare(name, tmp_path, noise.numpy(), theirs)


# Keys of the real files that change nothing at these values.
WAN_USUAL = {
    "beta_end": 0.02, "beta_schedule": "linear", "beta_start": 0.0001, "disable_corrector": [],
    "dynamic_thresholding_ratio": 0.995, "final_sigmas_type": "zero", "lower_order_final": True,
    "num_train_timesteps": 1000, "predict_x0": True, "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0, "solver_order": 2, "solver_p": None, "solver_type": "bh2",
    "steps_offset": 0, "thresholding": False, "timestep_spacing": "linspace",
    "trained_betas": None, "use_beta_sigmas": False, "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}  # fmt: skip
SDXL = {
    "_class_name": "EulerDiscreteScheduler", "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "clip_sample": False, "interpolation_type": "linear",
    "num_train_timesteps": 1000, "prediction_type": "epsilon", "sample_max_value": 1.0,
    "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
    "timestep_spacing": "leading", "trained_betas": None, "use_karras_sigmas": False,
}  # fmt: skip
FLUX_DEV = {
    "_class_name": FLOW, "_diffusers_version": "0.30.0.dev0", "base_image_seq_len": 256,
    "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15, "num_train_timesteps": 1000,
    "shift": 3.0, "use_dynamic_shifting": True,
}  # fmt: skip


def test_the_files_of_real_models_are_read(tmp_path: Path) -> None:
    found = str(read(folder_of(tmp_path, **WAN, **WAN_USUAL), "flow"))
    wanted = "unipc, flow_shift 3.0, solver_order 2, prediction_type flow_prediction (scheduler/"
    assert found.startswith(wanted)
    assert read(tmp_path, "flow", flow_shift=5.0).options["flow_shift"] == 5.0
    euler = read(tmp_path, "flow", "flow_euler")
    assert (euler.name, euler.options["shift"]) == ("flow_euler", 3.0), "another class's shift"
    assert read(folder_of(tmp_path, **SDXL), "discrete").name == "euler"
    assert read(tmp_path, "discrete", "ddim").options["set_alpha_to_one"] is False


def test_the_files_of_flux_are_read(tmp_path: Path) -> None:
    found = read(folder_of(tmp_path, **FLUX_DEV), "even_flow").of_tokens(4096)
    assert str(found).startswith("flow_euler, shift 3.16 by 4096 tokens (scheduler/")
    assert read(None, "even_flow").options == found.options
    asked = read(tmp_path, "even_flow", flow_shift=2.0)
    np.testing.assert_allclose(asked.schedule(2).times, [1000, 2000 / 3], rtol=1e-6)
    schnell = folder_of(tmp_path, **FLUX_DEV | {"shift": 1.0, "use_dynamic_shifting": False})
    times = read(schnell, "even_flow").schedule(4).times
    np.testing.assert_allclose(times, [1000, 750, 500, 250])


def test_without_a_file_it_is_the_usual_one_and_says_so(tmp_path: Path) -> None:
    found = read(None, "flow")
    assert (found.name, found.options["flow_shift"]) == ("unipc", 3.0)
    assert "no scheduler_config.json" in str(found)
    np.testing.assert_allclose(read(tmp_path, "discrete").schedule(4).times, [751, 501, 251, 1])


WRONG = {
    "of_another_family": (WAN, "discrete", {}),
    "class_unknown": ({"_class_name": "PNDMScheduler"}, "discrete", {}),
    "named_for_another_family": (WAN, "flow", {"sampler": "euler"}),
    "misspelt": (WAN, "flow", {"sampler": "unpic"}),
    "option_unknown": (WAN | {"flow_shfit": 3.0}, "flow", {}),
    "options_unsupported": (
        WAN | {"use_karras_sigmas": True, "solver_order": 4, "flow_shift": "3"},
        "flow",
        {},
    ),
    "tokens_of_wan": (FLUX | {"_class_name": FLOW}, "flow", {}),
    "unipc_of_flux": (WAN, "even_flow", {}),
    "tokens_of_flux": (FLUX | {"_class_name": FLOW, "max_image_seq_len": 256}, "even_flow", {}),
    "re_noising_by_an_option": ({"_class_name": FLOW, "stochastic_sampling": True}, "flow", {}),
    "zero_snr_of_lcm": (
        {"_class_name": "LCMScheduler", "rescale_betas_zero_snr": True},
        "discrete",
        {},
    ),
    "default_unsupported": ({"_class_name": "DDIMScheduler"}, "discrete", {}),
    "zero_snr_of_noise": (
        {"_class_name": "DDIMScheduler", "clip_sample": False, "rescale_betas_zero_snr": True},
        "discrete",
        {},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_supported_is_said(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said, family, how = WRONG[case]
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path, **said)
    check_refused(f"samplers/{case}", ConfigError, lambda: read(".", family, **how))


LINE = np.linspace(1.0, 0.0, 5)
BAD = {
    "no_step": lambda: flow_euler(0),
    "half_a_step": lambda: unipc(2.5),  # pyright: ignore[reportArgumentType]
    "steps_below_0": lambda: ddim(-1),
    "more_steps_than_times": lambda: euler(1001),
    "shift_of_0": lambda: flow_euler(4, 0.0, even=True),
    "shift_nan": lambda: unipc(4, float("nan")),
    "order": lambda: unipc(8, order=4),
    "no_times": lambda: flow_euler(4, train_steps=0),
    "sigmas_that_rise": lambda: euler_over(LINE[::-1]),
    "sigmas_nan": lambda: euler_over(np.array([1.0, np.nan, 0.0])),
    "sigmas_above_1": lambda: euler_over(2 * LINE),
    "one_sigma": lambda: euler_over(LINE[:1]),
    "step_beyond": lambda: taken(4),
    "step_from_the_end": lambda: taken(-1),
}


def taken(i: Any) -> Any:
    """Run step i of four."""
    state = start(euler_over(LINE), jnp.ones(2))
    return step(euler_over(LINE), i, state, lambda x, t: x + t).x


@pytest.mark.parametrize("case", BAD)
def test_what_has_no_schedule_is_refused(case: str) -> None:
    check_refused(f"samplers/schedule_{case}", InputError, BAD[case])


def test_a_traced_step_beyond_the_last_is_nan() -> None:
    np.testing.assert_array_equal(jax.jit(taken)(3), taken(3))
    assert np.isnan(jax.jit(taken)(4)).all() and np.isnan(jax.jit(taken)(-1)).all()


def test_without_a_file_each_flux_model_has_its_own_times() -> None:
    settings = SamplingSettings()
    dev, schnell = (settings.sampler_of(None, FLUX_SIZES[f"flux.1-{x}"], 256) for x in NAMES_OF)
    np.testing.assert_allclose(schnell.schedule(4).times, [1000, 750, 500, 250])
    assert dev.schedule(4).times[1] > 800, "shifted by the picture's tokens"


def test_no_time_is_used_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 1000"):
        read(tmp_path, "discrete", "euler").schedule(1001)


class Scanned(nnx.Module):
    """A model that runs its layers in `nnx.scan`."""

    def __init__(self) -> None:
        self.layers = nnx.vmap(lambda r: nnx.Linear(4, 4, rngs=r))(nnx.Rngs(0).split(3))

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        run = nnx.scan(
            lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return run(x, self.layers) + t / 1000


def test_a_model_with_scanned_layers_is_passed_itself_or_cloned() -> None:
    model = Scanned()
    drawn = partial(sample, noise=jnp.ones((2, 4)), schedule=flow_euler(2))
    np.testing.assert_array_equal(drawn(model), drawn(lambda x, t: nnx.clone(model)(x, t)))
    check_refused("samplers/scanned_layers", InputError, lambda: drawn(lambda x, t: model(x, t)))


def test_the_example_of_sample_runs() -> None:
    names = {"jax": jax, "jnp": jnp, "flow_euler": flow_euler, "sample": sample}
    (example,) = DocTestFinder().find(sample, globs=names)
    assert len(example.examples) == 4 and not DocTestRunner().run(example).failed
