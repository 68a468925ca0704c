"""What a kernel of norm and rotary embedding does to a token's row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flax import nnx

from maxattn import sharding
from maxattn.modules.qk_norm import QKNorm, ZeroCentredRMSNorm
from maxattn.rope import Rotary

KINDS = {
    None: None,
    "rms_norm": "head",
    "zero_centred_rms_norm": "head",
    "rms_norm_across_heads": "across",
}


@dataclass(frozen=True)
class NormRopeRow:
    """Say what is done to a row: one token's projection, N heads of H channels.

    Args:
        heads: N.
        head_dim: H.
        norm: "across" all channels of a token, "head" by head, or None.
        eps: of the norm.
        style: of the rotary embedding, "interleaved" or "half", or None for none.
    """

    heads: int
    head_dim: int
    norm: str | None
    eps: float
    style: str | None

    def on_device(self, letters: str, shape: sharding.MeshShape) -> NormRopeRow:
        """Return what is done to the part of a row that a device has.

        Args:
            letters: of the result's axes, the heads third.
            shape: of the mesh.
        """
        return replace(self, heads=self.heads // sharding.ways(letters[2], shape))


def fused_row(
    qk_norm: str | None, norm: QKNorm | None, rotary: Rotary | None, heads: int, head_dim: int
) -> NormRopeRow | None:
    """Describe what a kernel would do to a token's row, or return None where none can.

    Args:
        qk_norm: the kind of the norm; the kernels take RMS norms and None.
        norm: of the queries or keys.
        rotary: its table, checked against the heads; the kernels turn whole heads, all alike.
        heads: N.
        head_dim: H.
    """
    nothing = norm is None and rotary is None
    if rotary is not None and (rotary.partial or rotary.cos.ndim == 4):
        return None
    if nothing or qk_norm not in KINDS:
        return None
    kind, eps = None, 0.0
    if norm is not None:
        if type(norm) not in (
            nnx.RMSNorm,
            ZeroCentredRMSNorm,
        ):  # a class of them may do other things
            return None
        kind, eps = KINDS[qk_norm], norm.epsilon
    return NormRopeRow(heads, head_dim, kind, eps, None if rotary is None else rotary.style)
