"""Arrays of other libraries, which are told from ours by their dtypes."""

from __future__ import annotations

from maxattn.errors import InputError


def check_not_torch(name: str, dtype: str) -> None:
    """Refuse a tensor of torch by the name of its dtype, with the way to an array.

    Raises:
        InputError: it is one.
    """
    if dtype.startswith("torch."):
        whole = f"{name}.float()" if dtype == "torch.bfloat16" else name  # which numpy lacks
        rule = "it is an array of jax or numpy, and this is a tensor of torch"
        raise InputError(name, dtype, rule, f"pass jnp.asarray({whole}.numpy())")
