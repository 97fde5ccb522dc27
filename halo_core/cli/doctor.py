"""`halo doctor`: what this machine has, what is missing, and the line that installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

NEEDED = ("torch", "transformers", "pluggy", "safetensors", "PyYAML", "datasets", "typer", "rich", "huggingface_hub")
OPTIONAL = (
    ("liger-kernel", "liger_kernel", "fused kernels", "pip install 'halo-moe[gpu]'"),
    (
        "flash-linear-attention",
        "fla",
        "fast gated delta rule (GPU machines only)",
        "pip install 'halo-moe[linear-attention]'",
    ),
    ("flash-attn-4", "flash_attn", "flash attention", "pip install 'halo-moe[flash]'"),
    (
        "deep_ep",
        "deep_ep",
        "fast token exchange between GPUs",
        "see the documentation of expert parallelism: it is built from source",
    ),
    ("tensorboard", "tensorboard", "report_to: tensorboard", "pip install 'halo-moe[tensorboard]'"),
    ("wandb", "wandb", "report_to: wandb", "pip install 'halo-moe[wandb]'"),
    ("trackio", "trackio", "report_to: trackio", "pip install 'halo-moe[trackio]'"),
    ("matplotlib", "matplotlib", "pictures", "pip install 'halo-moe[plot]'"),
)


def run() -> None:
    """Print versions, the device, and every optional package with how to get it."""
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("halo-moe", *NEEDED):
        print(f"{name:24} {_version(name) or 'MISSING'}")
    print(f"{'device':24} {_device()}")
    for distribution, module, use, line in OPTIONAL:
        is_present = importlib.util.find_spec(module) is not None
        state = f"present {_version(distribution) or ''}".rstrip() if is_present else f"missing  {line}"
        print(f"{distribution:24} {state}  [{use}]")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"cpu only ({torch.get_num_threads()} threads)"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}"
