"""What a time measured on this card depends on, and which of PyTorch's flags bind cuDNN."""

import os
from typing import NamedTuple

import torch

from mucudnn.backends.cudnn import compiler, nvml
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.tile_source import REVISION
from mucudnn.profile import Environment

_CONFIG = "CUBLAS_WORKSPACE_CONFIG"

_REPEATING = (":4096:8", ":16:8")
"""Its values with which cuBLAS gives the same bits on several streams (cuBLAS, "Results reproducibility")."""

_HAS_TUNABLE = hasattr(torch._C, "_cuda_tunableop_is_enabled")
"""Whether this build of torch has TunableOp: those without CUDA have not."""

_VARIABLES = (
    "CUBLAS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDNN_CONV_WSCAP_DBG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_TUNABLEOP",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN",
)
"""What names of variables begin with that count."""


def present_rules() -> Rules:
    """Return what PyTorch's flags permit now."""
    cudnn = torch.backends.cudnn
    # Not cudnn.allow_tf32: reading it raises as soon as somebody has set the newer attribute alone.
    precision = str(cudnn.conv.fp32_precision)  # type: ignore[attr-defined]  # newer than torch's hints
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return Rules(allow_tf32=precision == "tf32", deterministic=deterministic)


class Obstacle(NamedTuple):
    """What keeps cuBLAS from multiplying matrices.

    Attributes:
        setting: its name in an environment's policy.
        reason: what is so, and by which of PyTorch's flags; words without a full stop.
    """

    setting: str
    reason: str


_ROUNDS = Obstacle(
    "torch.backends.cuda.matmul in TF32",
    "matrix products of float32 may be rounded to TF32 (torch.backends.cuda.matmul.fp32_precision, which "
    "torch.set_float32_matmul_precision sets)",
)
_MUST_REPEAT = Obstacle(
    f"torch.use_deterministic_algorithms without {_CONFIG}",
    "torch.use_deterministic_algorithms forbids matrix products unless "
    f"{_CONFIG} is {' or '.join(_REPEATING)}",
)
_MEASURES = Obstacle("torch.cuda.tunable", "TunableOp measures inside of the first matrix products")


def obstacle_to_products(dtype: str) -> Obstacle | None:
    """Return what in PyTorch's flags keeps cuBLAS from multiplying matrices of `dtype` now, if anything does.

    They are to be rounded as that type is, which those of float32 in TF32 are not. PyTorch would raise where
    all must be deterministic and cuBLAS is not configured for it, and TunableOp measures inside of the first
    calls.
    """
    if dtype == "float32" and str(torch.backends.cuda.matmul.fp32_precision) == "tf32":
        return _ROUNDS
    must_repeat = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if must_repeat and os.environ.get(_CONFIG) not in _REPEATING:
        return _MUST_REPEAT
    return _MEASURES if _HAS_TUNABLE and torch.cuda.tunable.is_enabled() else None


def present_environment(index: int, cudnn_version: int | None) -> Environment:
    """Return card, libraries and flags of this process, as they are now.

    Args:
        index: the card's number.
        cudnn_version: of the library; None where it cannot be used.
    """
    conditions = {
        **nvml.conditions(index),
        "driver": nvml.driver_version(),
        "CuPy": compiler.version() or "none",
        "memory": str(torch.cuda.get_device_properties(index).total_memory),  # less what a driver keeps
    }
    return Environment("cudnn", device_facts(index), _software(cudnn_version), present_policy(), conditions)


def device_facts(index: int) -> dict[str, str]:
    """Return what is known of a card that times depend on, and that never changes."""
    card = torch.cuda.get_device_properties(index)
    return {
        "name": card.name,
        "compute capability": f"{card.major}.{card.minor}",
        "multiprocessors": str(card.multi_processor_count),
    }


def _software(cudnn_version: int | None) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "cuDNN": str(cudnn_version or torch.backends.cudnn.version()),
        "engines": "cuDNN's" if cudnn_version is not None else "PyTorch's choice",
        "CUDA": str(torch.version.cuda),
        "tiles": str(REVISION),
    }


def present_policy() -> dict[str, str]:
    """Return what the user has set that times on a card depend on: flags, and variables that are set."""
    cudnn, rules = torch.backends.cudnn, present_rules()
    return {
        "enabled": str(cudnn.enabled),
        "TF32": str(rules.allow_tf32),
        "deterministic": str(rules.deterministic),
        # These two decide what PyTorch's own runs, and in how much memory.
        "benchmark": str(cudnn.benchmark),
        "benchmark limit": str(cudnn.benchmark_limit),
        **_obstacles(rules),
        **{name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
    }


def _obstacles(rules: Rules) -> dict[str, str]:
    """Return what keeps cuBLAS from multiplying; nothing as a rule, so that what was measured then answers.

    Where convolutions may compute in TF32, that products do is none: no others of float32 are tried there.
    """
    dtypes = ("float64",) if rules.allow_tf32 else ("float32", "float64")
    found = map(obstacle_to_products, dtypes)
    return {each.setting: "True" for each in found if each is not None}
