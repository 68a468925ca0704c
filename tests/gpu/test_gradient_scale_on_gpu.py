"""float16 gradients of GPU libraries at both ends of float16's range (`make test-gpu`)."""

from __future__ import annotations

import pytest

from tests.gpu.requirements import skip_unless_available
from tests.kernels.test_gradient_scale import judge, operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [10_000.0, 1e-6])
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "cudnn_flash_te"])
def test_gradients_are_right_at_both_ends_of_the_range(kernel: str, size: float) -> None:
    skip_unless_available(kernel)
    judge(operands(size), {"attention": kernel})
