"""The options of diffusers' schedulers, their defaults, and the values that are supported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Option(NamedTuple):
    """Hold an option's default, and the values that are supported.

    Args:
        default: diffusers', where a file leaves it out.
        supported: these values alone; empty: any number.
    """

    default: Any
    supported: tuple[Any, ...] = ()


OFF = Option(False, (False,))
UNSET = Option(None, (None,))
BOTH = (False, True)
SPACINGS = ("leading", "trailing", "linspace")
NO_OTHER_SIGMAS = {"use_karras_sigmas": OFF, "use_exponential_sigmas": OFF, "use_beta_sigmas": OFF}
DISCRETE = {
    "num_train_timesteps": Option(1000), "beta_start": Option(0.0001), "beta_end": Option(0.02),
    "beta_schedule": Option("linear", ("linear", "scaled_linear")), "trained_betas": UNSET,
    "prediction_type": Option("epsilon", ("epsilon", "v_prediction")), "steps_offset": Option(0),
    "rescale_betas_zero_snr": Option(False, BOTH),
}  # fmt: skip

# By diffusers' class: every option that changes its numbers.
OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "FlowMatchEulerDiscreteScheduler": NO_OTHER_SIGMAS
    | {
        "num_train_timesteps": Option(1000),
        "shift": Option(1.0),
        "use_dynamic_shifting": OFF,
        "invert_sigmas": OFF,
        "shift_terminal": UNSET,
        "stochastic_sampling": OFF,
    },
    "FlowMatchLCMScheduler": NO_OTHER_SIGMAS
    | {
        "num_train_timesteps": Option(1000),
        "shift": Option(1.0),
        "use_dynamic_shifting": OFF,
        "invert_sigmas": OFF,
        "shift_terminal": UNSET,
        "scale_factors": UNSET,
    },
    "UniPCMultistepScheduler": NO_OTHER_SIGMAS
    | {
        "num_train_timesteps": Option(1000),
        "flow_shift": Option(1.0),
        "solver_order": Option(2, (1, 2, 3)),
        "solver_type": Option("bh2", ("bh2",)),
        "disable_corrector": Option([]),
        "solver_p": UNSET,
        "prediction_type": Option("epsilon", ("flow_prediction",)),
        "use_flow_sigmas": Option(False, (True,)),
        "predict_x0": Option(True, (True,)),
        "lower_order_final": Option(True, (True,)),
        "thresholding": OFF,
        "final_sigmas_type": Option("zero", ("zero",)),
        "use_dynamic_shifting": OFF,
        "shift_terminal": UNSET,
    },
    "EulerDiscreteScheduler": NO_OTHER_SIGMAS
    | DISCRETE
    | {
        "timestep_spacing": Option("linspace", SPACINGS),
        "interpolation_type": Option("linear", ("linear",)),
        "timestep_type": Option("discrete", ("discrete",)),
        "final_sigmas_type": Option("zero", ("zero",)),
        "sigma_min": UNSET,
        "sigma_max": UNSET,
    },
    "DDIMScheduler": DISCRETE
    | {
        "timestep_spacing": Option("leading", SPACINGS),
        "set_alpha_to_one": Option(True, BOTH),
        "clip_sample": Option(True, (False,)),
        "thresholding": OFF,
    },
    "LCMScheduler": DISCRETE
    | {
        "beta_start": Option(0.00085),
        "beta_end": Option(0.012),
        "beta_schedule": Option("scaled_linear", ("scaled_linear", "linear")),
        "timestep_spacing": Option("leading", SPACINGS),
        "original_inference_steps": Option(50),
        "timestep_scaling": Option(10.0),
        "clip_sample": OFF,
        "thresholding": OFF,
    },
}

# What a pipeline that knows the size of the sample adds to its scheduler.
BY_SIZE: Mapping[str, Option] = {
    "use_dynamic_shifting": Option(False, BOTH),
    "base_shift": Option(0.5),
    "max_shift": Option(1.15),
    "base_image_seq_len": Option(256),
    "max_image_seq_len": Option(4096),
    "time_shift_type": Option("exponential", ("exponential", "linear")),
}

# Options that change nothing: they belong to what is not supported, or files have them from other
# classes.
UNREAD = {
    "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type",
    "clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value", "skip_prk_steps",
    "variance_type", "upscale_mode", "algorithm_type", "euler_at_final", "use_lu_lambdas",
    "lambda_min_clipped",
}  # fmt: skip
KNOWN = UNREAD.union(*OPTIONS.values())
