"""What a time measured on this card depends on, and which of PyTorch's flags bind cuDNN."""

import os

import torch

from mucudnn.algorithms import REVISION
from mucudnn.backends.cudnn import compiler, nvml
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.profile import Environment

_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDNN_CONV_WSCAP_DBG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_CUDNN_V8_API_DISABLED",
)


def present_rules() -> Rules:
    """Return what PyTorch's flags permit now."""
    cudnn = torch.backends.cudnn
    # Not cudnn.allow_tf32: reading it raises as soon as somebody has set the newer attribute alone.
    precision = str(cudnn.conv.fp32_precision)  # type: ignore[attr-defined]  # newer than torch's hints
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    products = str(torch.backends.cuda.matmul.fp32_precision)
    return Rules(
        allow_tf32=precision == "tf32", deterministic=deterministic, allow_tf32_products=products == "tf32"
    )


def present_environment(index: int, cudnn_version: int | None) -> Environment:
    """Return card, libraries and flags of this process, as they are now.

    Args:
        index: the card's number.
        cudnn_version: of the library; None where it cannot be used.
    """
    return Environment("cudnn", _device(index), _software(cudnn_version), _policy(), nvml.conditions(index))


def _device(index: int) -> dict[str, str]:
    card = torch.cuda.get_device_properties(index)
    return {
        "name": card.name,
        "compute capability": f"{card.major}.{card.minor}",
        "multiprocessors": str(card.multi_processor_count),
        "memory": str(card.total_memory),
    }


def _software(cudnn_version: int | None) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "cuDNN": str(cudnn_version or torch.backends.cudnn.version()),
        "engines": "cuDNN's" if cudnn_version is not None else "PyTorch's choice",
        "CUDA": str(torch.version.cuda),
        "driver": nvml.driver_version(),
        "CuPy": compiler.version() or "none",
        "algorithms": str(REVISION),
    }


def _policy() -> dict[str, str]:
    cudnn, rules = torch.backends.cudnn, present_rules()
    return {
        "enabled": str(cudnn.enabled),
        "TF32": str(rules.allow_tf32),
        "TF32 products": str(rules.allow_tf32_products),
        "deterministic": str(rules.deterministic),
        # These two decide what PyTorch's own runs, and in how much memory.
        "benchmark": str(cudnn.benchmark),
        "benchmark limit": str(cudnn.benchmark_limit),
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
