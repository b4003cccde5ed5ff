"""Operations of the U-Net's layers: reference.py defines them, cudnn.py and hopper compute them, as plan.py decides."""

from typing import Any

TORCH, CUDNN, HOPPER = "torch", "cudnn", "hopper"


def operations(name: str) -> Any:
    """The module with the functions of reference.py for TORCH, CUDNN or HOPPER."""
    if name == HOPPER:
        from networks.ops.hopper import layers

        return layers
    if name == CUDNN:
        from networks.ops import cudnn

        return cudnn
    from networks.ops import reference

    return reference
