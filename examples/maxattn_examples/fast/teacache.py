"""TeaCache's schedule of a model whose modulation depends on the time alone, as Wan's does.

Such a model's schedule is of weights, sampler, steps and threshold: it is known before the run.

Source: Liu et al. 2024, https://arxiv.org/abs/2411.19108; the polynomials, with which it was
published for Wan 2.1: https://github.com/ali-vilab/TeaCache 7c10efc, TeaCache4Wan2.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from .cache_settings import COMPUTE, REUSE, TeaCacheSettings, ends_of

# Of the highest power first; of the embedding of the time, and of the modulation made of it.
POLYNOMIALS: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("wan-2.1-t2v-1.3b", "embedding"):
        (2.39676752e3, -1.31110545e3, 2.01331979e2, -8.29855975, 1.37887774e-1),
    ("wan-2.1-t2v-1.3b", "modulation"):
        (-5.21862437e4, 9.23041404e3, -5.28275948e2, 1.36987616e1, -4.99875664e-2),
    ("wan-2.1-t2v-14b", "embedding"):
        (-5784.54975374, 5449.50911966, -1811.16591783, 256.27178429, -13.02252404),
    ("wan-2.1-t2v-14b", "modulation"):
        (-3.03318725e5, 4.90537029e4, -2.65530556e3, 5.87365115e1, -3.15583525e-1),
    ("wan-2.1-i2v-480p", "embedding"):
        (-302.331670, 223.948934, -52.5463970, 5.87348440, -0.201973289),
    ("wan-2.1-i2v-480p", "modulation"):
        (2.57151496e5, -3.54229917e4, 1.40286849e3, -1.35890334e1, 1.32517977e-1),
    ("wan-2.1-i2v-720p", "embedding"):
        (-114.36346466, 65.26524496, -18.82220707, 4.91518089, -0.23412683),
    ("wan-2.1-i2v-720p", "modulation"):
        (8.10705460e3, 2.13393892e3, -3.72934672e2, 1.66203073e1, -4.17769401e-2),
}  # fmt: skip
# Of the models that they are of.
SIZES = {
    "wan-2.1-t2v-1.3b": {"num_layers": 30, "in_channels": 16, "experts": 1},
    "wan-2.1-t2v-14b": {"num_layers": 40, "in_channels": 16, "experts": 1},
    "wan-2.1-i2v-480p": {"num_layers": 40, "in_channels": 36, "experts": 1},
    "wan-2.1-i2v-720p": {"num_layers": 40, "in_channels": 36, "experts": 1},
}


def teacache(states: Float[np.ndarray, "n d"], how: TeaCacheSettings) -> str:
    """Return the schedule of a model: a letter for each step.

    The change of its state from one step to the next, |m - before| / |before| in means, goes
    through a polynomial; steps reuse while the sum since the last computed one is below the
    threshold.

    Args:
        states: of the time of each step.
        how: polynomial, threshold, and steps that compute.
    """
    polynomial = how.polynomial
    assert polynomial is not None, "it was filled in"
    if isinstance(polynomial, str):
        polynomial = POLYNOMIALS[polynomial, how.input]
    first, last = ends_of(how, len(states))
    letters, total = "", 0.0
    for i, state in enumerate(states):
        if i < first or i >= len(states) - last:
            letters, total = letters + COMPUTE, 0.0
            continue
        change = np.abs(state - states[i - 1]).mean() / np.abs(states[i - 1]).mean()
        total += float(np.polyval(polynomial, change))
        letters += REUSE if total < how.threshold else COMPUTE
        total = total if total < how.threshold else 0.0
    return letters
