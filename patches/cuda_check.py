#!/usr/bin/env python3
"""Compiles the CUDA files of ours and those we touch for every architecture, and prints what our
kernels take: registers, shared memory, spills. No device is needed; `make cuda-check` calls it.

    cuda_check.py [--arch 90]... [--file dflash.cu]... [--cublas WHEEL_OR_FOLDER] [--json]

Exit code: 0 all is well, 1 a compile error or a spill in a kernel of ours, 2 no nvcc or bad usage.
Standard library only. llama.cpp's headers need cuBLAS's; where the toolkit has none they are taken
from the wheel `nvidia-cublas` of the package index (some 450 MB, once; only the headers are kept).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from patchlib import PatchsetError, exit_code
from patchlib.base import SdistBase, SourceBase, read_base_toml
from patchlib.series import PatchSet
from patchlib.tree import apply

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "cuda-check"
FILES = ("dflash.cu", "top-k.cu", "ggml-cuda.cu")
# As llama.cpp builds them; 120 has matrix instructions only in its own variant.
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120a")
OPTIONS = ("-std=c++17", "-O3", "-use_fast_math", "-extended-lambda")
OURS = "dflash"  # every kernel of ours has it in its name

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?:sm_)?(?P<arch>\w+)'")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores,"
    r" (?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers(?P<rest>.*)")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


@dataclass
class Kernel:
    """What ptxas says of one kernel on one architecture."""

    file: str
    name: str
    arch: str
    registers: int = 0
    shared: int = 0  # bytes, without what the launch asks for
    stack: int = 0
    spills: int = 0  # bytes stored and loaded


def main(arguments: list[str]) -> int:
    """Returns 0 done, 1 failed, 2 bad usage or no nvcc, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="cuda_check.py", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--arch", action="append", help=f"of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--file", action="append", choices=FILES, help="default: all")
    parser.add_argument("--cublas", type=Path, help="wheel or folder with cublas_v2.h")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    options = parser.parse_args(arguments)
    return exit_code(lambda: check(options), "")


def check(options: argparse.Namespace) -> int:
    """Compile and print. Returns the exit code."""
    nvcc = find_nvcc()
    known = architectures(nvcc, options.arch)
    tree = make_tree()
    headers = cublas_headers(nvcc, options.cublas)
    kernels = []
    for file in options.file or FILES:
        print(f"{file}: {', '.join(known)}", file=sys.stderr, flush=True)
        kernels += compile_file(nvcc, tree, file, known, headers)
    ours = [kernel for kernel in kernels if OURS in kernel.name]
    rows = [asdict(kernel) for kernel in ours]
    print(json.dumps(rows, indent=1) if options.json else table(ours))
    count = len(kernels) - len(ours)
    if count:
        print(f"and {count} kernels of the base in these files", file=sys.stderr)
    spilled = sorted({kernel.name for kernel in ours if kernel.spills})
    if spilled:
        print(f"error: registers are spilled in {', '.join(spilled)}", file=sys.stderr)
    return 1 if spilled else 0


def find_nvcc() -> str:
    """CUDACXX, else the one in PATH, else the toolkit's usual place."""
    named = os.environ.get("CUDACXX")
    names = [named] if named else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise PatchsetError(
            f"`{names[0]}` not found; install the CUDA toolkit (12.8 or newer) or name its"
            " nvcc in CUDACXX",
            code=2,
        )
    return found


def architectures(nvcc: str, wanted: list[str] | None) -> list[str]:
    """Those of ours (or the wanted ones) that this nvcc compiles for."""
    done = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True)
    known = set(re.findall(r"sm_(\d+)", done.stdout))
    for arch in wanted or ():
        if arch not in ARCHITECTURES:
            raise PatchsetError(f"`--arch {arch}` is not one of {', '.join(ARCHITECTURES)}", code=2)
    result = [arch for arch in wanted or ARCHITECTURES if arch.rstrip("a") in known]
    if not result:
        raise PatchsetError(f"`{nvcc}` compiles for none of {', '.join(wanted or ARCHITECTURES)}")
    missing = [arch for arch in wanted or ARCHITECTURES if arch not in result]
    if missing:
        print(f"note: this nvcc does not know {', '.join(missing)}", file=sys.stderr)
    return result


def make_tree() -> Path:
    """The patched tree, brought up to date file by file."""
    patches = ROOT / "patches"
    source = os.environ.get("LLAMA_CPP_SOURCE")
    base = SourceBase(Path(source)) if source else SdistBase(read_base_toml(patches / "base.toml"))
    tree = FOLDER / "llama.cpp"
    FOLDER.mkdir(parents=True, exist_ok=True)
    apply(PatchSet.load(patches), base, tree, False)
    return tree


def cublas_headers(nvcc: str, given: Path | None) -> Path | None:
    """Folder of cuBLAS's headers; None where the toolkit has them."""
    folder = FOLDER / "include"
    if given is not None and given.is_dir():
        found = next(given.rglob("cublas_v2.h"), None)
        if found is None:
            raise PatchsetError(f"no cublas_v2.h below `{given}`", code=2)
        return found.parent
    if given is not None:
        _unpack_headers(given, folder)
        return folder
    if toolkit_has_cublas(nvcc):
        return None
    if not (folder / "cublas_v2.h").is_file():
        major = re.search(r"release (\d+)", _output([nvcc, "--version"]))
        package = "nvidia-cublas-cu12" if major and major[1] == "12" else "nvidia-cublas"
        with tempfile.TemporaryDirectory(dir=FOLDER) as wheels:
            print(f"downloading {package} for its headers", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            done = subprocess.run([*command, "--dest", wheels, package])
            wheel = next(Path(wheels).glob("*.whl"), None)
            if done.returncode or wheel is None:
                raise PatchsetError(
                    f"pip could not download {package}; give a wheel or folder with --cublas"
                )
            _unpack_headers(wheel, folder)
    return folder


def toolkit_has_cublas(nvcc: str) -> bool:
    """Whether nvcc finds cuBLAS's headers by itself."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text("#include <cublas_v2.h>\n")
        return subprocess.run([nvcc, "-E", source], capture_output=True).returncode == 0


def _unpack_headers(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if re.search(r"/include/[^/]+\.h$", n)]
            for name in names:
                (folder / name.rsplit("/", 1)[1]).write_bytes(archive.read(name))
    except zipfile.BadZipFile as error:
        raise PatchsetError(f"`{wheel}` is no wheel: {error}", code=2) from error
    if not (folder / "cublas_v2.h").is_file():
        raise PatchsetError(f"`{wheel}` holds no cublas_v2.h", code=2)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def compile_file(
    nvcc: str, tree: Path, file: str, known: list[str], headers: Path | None
) -> list[Kernel]:
    """Compile one file for all architectures. Raises PatchsetError with nvcc's text above it."""
    ggml = tree / "ggml"
    command: list[str | Path] = [nvcc, *OPTIONS, "-Xptxas", "-v", "-c"]
    for arch in known:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    for folder in (ggml / "include", ggml / "src", ggml / "src" / "ggml-cuda"):
        command += ["-I", folder]
    if headers is not None:
        command += ["-isystem", headers]
    command += [ggml / "src" / "ggml-cuda" / file, "-o", FOLDER / f"{file}.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise PatchsetError(f"{file} does not compile; the reason stands above")
    return parse(file, done.stderr)


def parse(file: str, text: str) -> list[Kernel]:
    """Kernels in the output of `ptxas -v`."""
    kernels: list[Kernel] = []
    for line in text.splitlines():
        entry = _ENTRY.search(line)
        if entry:
            kernels.append(Kernel(file, kernel_name(entry["name"]), entry["arch"]))
            continue
        if not kernels:
            continue
        last = kernels[-1]
        stack, used = _STACK.search(line), _USED.search(line)
        if stack:
            last.stack = int(stack["stack"])
            last.spills = int(stack["stores"]) + int(stack["loads"])
        elif used:
            last.registers = int(used["registers"])
            shared = _SHARED.search(used["rest"])
            last.shared = int(shared[1]) if shared else 0
    return kernels


def kernel_name(mangled: str) -> str:
    """`dflash_conv<half>` of a mangled name of ours; other names stay as they are."""
    found = re.search(rf"(\d+)({OURS}_\w+)", mangled)
    if not found:
        return mangled
    length = int(found[1])
    name, rest = found[2][:length], found[2][length:]
    types = {
        "If": "float",
        "I6__half": "half",
        "I13__nv_bfloat16": "bfloat16",
        "I14__hip_bfloat16": "bfloat16",
        "Iy": "key",
    }
    argument = next((text for code, text in types.items() if rest.startswith(code)), None)
    return f"{name}<{argument}>" if argument else name


def table(kernels: list[Kernel]) -> str:
    """One line per kernel and architecture."""
    width = max((len(kernel.name) for kernel in kernels), default=6)
    lines = [f"{'kernel':{width}}  {'arch':>5}  registers  shared  stack  spills"]
    for kernel in sorted(kernels, key=lambda k: k.name):
        lines.append(
            f"{kernel.name:{width}}  {kernel.arch:>5}  {kernel.registers:9}  {kernel.shared:6}"
            f"  {kernel.stack:5}  {kernel.spills:6}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
