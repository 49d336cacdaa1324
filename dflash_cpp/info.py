"""What is installed: versions, the base, backends and devices, where the libraries are."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_convert.console import human_bytes

from . import __version__, _libs

PROGRAMS = ("llama-server", "llama-cli", "llama-quantize", "llama-bench")

BIN_PATH_VARIABLE = "DFLASH_BIN_PATH"

# enum ggml_backend_dev_type
_DEVICE_KINDS = ("CPU", "GPU", "iGPU", "accelerator")


@dataclass(frozen=True)
class Device:
    """One device that ggml can compute on; memory in bytes."""

    name: str
    description: str
    backend: str
    kind: str
    memory_free: int
    memory_total: int


def program_path(name: str) -> Path:
    """Return where the built program `name` is, or should be.

    In the folder DFLASH_BIN_PATH, else in `bin` of the package.
    """
    suffix = ".exe" if os.name == "nt" else ""
    chosen = os.environ.get(BIN_PATH_VARIABLE)
    folder = Path(chosen).expanduser().absolute() if chosen else Path(__file__).parent / "bin"
    return folder / f"{name}{suffix}"


def devices() -> list[Device]:
    """List the devices of the loaded build.

    Raises:
        DFlashLibraryError: The libraries are missing or do not fit.
    """
    ggml = _ggml()
    found = []
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(i)
        registry = ggml.ggml_backend_dev_backend_reg(device)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = ggml.ggml_backend_dev_type(device)
        found.append(
            Device(
                name=_text(ggml.ggml_backend_dev_name(device)),
                description=_text(ggml.ggml_backend_dev_description(device)).strip(),
                backend=_text(ggml.ggml_backend_reg_name(registry)),
                kind=_DEVICE_KINDS[kind] if 0 <= kind < len(_DEVICE_KINDS) else "other",
                memory_free=free.value,
                memory_total=total.value,
            )
        )
    return found


def compute_backend(n_gpu_layers: int) -> str:
    """Return the backend that runs a model's layers: that of the first GPU, else `CPU`."""
    if n_gpu_layers != 0:
        for device in devices():
            if device.kind in ("GPU", "iGPU"):
                return device.backend
    return "CPU"


def small_batch_kernels() -> bool:
    """Tell whether the CPU's products of few columns are ours, as fast and exact as they promise.

    False for a CPU without such kernels, and with `GGML_DFLASH_SMALL_BATCH=0`.
    """
    _libs.load()
    import llama_cpp

    return b"DFLASH_SMALL_BATCH = 1" in llama_cpp.llama_print_system_info()


def build_info() -> dict[str, Any]:
    """Return what `dflash_build_info()` of the loaded library says."""
    lib = _libs.load()
    lib.dflash_build_info.restype = ctypes.c_char_p
    return dict(json.loads(lib.dflash_build_info() or b"{}"))


def gather() -> dict[str, Any]:
    """Collect everything that `dflash-cpp info` shows.

    Returns:
        Plain data; `error` is a sentence when the libraries do not load, else None.
    """
    facts: dict[str, Any] = {
        "version": __version__,
        "llama_cpp_python": _distribution("llama-cpp-python"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "library_dir": str(_libs.library_dir()),
        "programs": {
            p: str(program_path(p)) if program_path(p).exists() else None for p in PROGRAMS
        },
        "build": None,
        "libraries": {},
        "devices": [],
        "error": None,
        "hint": None,
    }
    try:
        facts["build"] = build_info()
        facts["devices"] = [asdict(d) for d in devices()]
        facts["libraries"] = {
            name: str(path) if (path := _libs.find_library(name)) else None
            for name in ("dflash", "llama", "ggml", "ggml-base")
        }
    except _libs.DFlashLibraryError as exc:
        facts["error"], facts["hint"] = exc.message, exc.hint
    facts["backends"] = sorted({d["backend"] for d in facts["devices"]})
    return facts


def lines(facts: dict[str, Any]) -> list[str]:
    """Return what `gather` found as lines for people."""
    build = facts["build"] or {}
    shown = [
        f"dflash-toolkit    {facts['version']}",
        f"llama-cpp-python  {facts['llama_cpp_python'] or 'not installed'}",
        f"llama.cpp base    {build.get('base_commit', 'unknown')}",
        f"patch set         {build.get('patch_key', 'unknown')}",
        f"compiler          {build.get('compiler', 'unknown')}",
        f"python            {facts['python']} on {facts['platform']}",
        f"backends          {', '.join(facts['backends']) or 'none'}",
    ]
    for device in facts["devices"]:
        memory = f"{human_bytes(device['memory_total'])} memory" if device["memory_total"] else ""
        parts = [device["kind"], device["description"], memory]
        shown.append(f"device            {device['name']}: {', '.join(p for p in parts if p)}")
    shown.append(f"libraries         {facts['library_dir']}")
    for name, path in facts["libraries"].items():
        shown.append(f"  {name:<15} {path or 'missing'}")
    shown.append("programs")
    for name, path in facts["programs"].items():
        shown.append(f"  {name:<15} {path or 'not built'}")
    return shown


def _ggml() -> ctypes.CDLL:
    _libs.load()
    path = _libs.find_library("ggml")
    if path is None:
        raise _libs.DFlashLibraryError(f"`{_libs.library_dir()}` holds no libggml")
    ggml = ctypes.CDLL(str(path))
    handle = ctypes.c_void_p
    prototypes: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_dev_count": (ctypes.c_size_t, []),
        "ggml_backend_dev_get": (handle, [ctypes.c_size_t]),
        "ggml_backend_dev_name": (ctypes.c_char_p, [handle]),
        "ggml_backend_dev_description": (ctypes.c_char_p, [handle]),
        "ggml_backend_dev_type": (ctypes.c_int, [handle]),
        "ggml_backend_dev_backend_reg": (handle, [handle]),
        "ggml_backend_reg_name": (ctypes.c_char_p, [handle]),
        "ggml_backend_dev_memory": (
            None,
            [handle, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
        ),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
