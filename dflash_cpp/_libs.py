"""Find the native libraries and make `llama_cpp` use the very same ones.

Everything must come from one build: libdflash reaches into libllama, and glibc hands out a library
that is already loaded under the same soname, wherever it came from.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from .errors import DFlashLibraryError

API_VERSION = 3

LIB_PATH_VARIABLE = "DFLASH_LIB_PATH"

_GGUF_TYPE_UINT32 = 4

_BUILD_HINT = "build them with `make build`, or install the package with `pip install .`"

# names of one build of llama.cpp and of this toolkit, with the versions a soname may carry
_NATIVE = re.compile(r"(?:lib)?(?:dflash|llama|ggml(?:-base)?)\.(?:so(?:\.\d+)*|dylib|dll)")

_log = logging.getLogger("dflash")
_lock = threading.RLock()
_loaded: ctypes.CDLL | None = None


def library_dir() -> Path:
    """Return the folder of the native libraries: DFLASH_LIB_PATH, else `lib` of the package."""
    chosen = os.environ.get(LIB_PATH_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else Path(__file__).parent / "lib"


def find_library(base: str, folder: Path | None = None) -> Path | None:
    """Return the path of library `base` (for instance `dflash`) in `folder`, None if absent."""
    if sys.platform == "win32":
        names = [f"{base}.dll", f"lib{base}.dll"]
    elif sys.platform == "darwin":
        names = [f"lib{base}.so", f"lib{base}.dylib"]
    else:
        names = [f"lib{base}.so"]
    folder = library_dir() if folder is None else folder
    return next((folder / name for name in names if (folder / name).exists()), None)


def load() -> ctypes.CDLL:
    """Return libdflash, loaded beside the libllama that `llama_cpp` uses.

    Raises:
        DFlashLibraryError: The libraries are missing, of another version, or `llama_cpp` (or
            another package) has already loaded others.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(library_dir())
        return _loaded


class _GgufInit(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def gguf_uint32(path: str | os.PathLike[str], key: str) -> int | None:
    """Read one uint32 of a GGUF file's header; None if the file or the key is not there.

    The vocabulary of a draft has hundreds of thousands of strings: ggml skips them in
    milliseconds.
    """
    with _open_gguf(path) as (ggml, gguf):
        if not gguf:
            return None
        index = ggml.gguf_find_key(gguf, key.encode())
        if index < 0 or ggml.gguf_get_kv_type(gguf, index) != _GGUF_TYPE_UINT32:
            return None
        return int(ggml.gguf_get_val_u32(gguf, index))


def gguf_tensor_types(path: str | os.PathLike[str]) -> set[int]:
    """Read the ggml types of a GGUF file's tensors; empty if there is no such file."""
    with _open_gguf(path) as (ggml, gguf):
        count = ggml.gguf_get_n_tensors(gguf) if gguf else 0
        return {int(ggml.gguf_get_tensor_type(gguf, i)) for i in range(count)}


@contextlib.contextmanager
def _open_gguf(path: str | os.PathLike[str]) -> Iterator[tuple[ctypes.CDLL, int | None]]:
    """ggml's library, its prototypes set, and the handle of a file; None if it does not open."""
    load()
    library = find_library("ggml-base")
    if library is None:
        raise DFlashLibraryError("no libggml-base beside libllama", hint=_BUILD_HINT)
    ggml = ctypes.CDLL(str(library))
    handle, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
    for name, result, arguments in (
        ("gguf_init_from_file", handle, [text, _GgufInit]),
        ("gguf_find_key", number, [handle, text]),
        ("gguf_get_kv_type", ctypes.c_int, [handle, number]),
        ("gguf_get_val_u32", ctypes.c_uint32, [handle, number]),
        ("gguf_get_n_tensors", number, [handle]),
        ("gguf_get_tensor_type", ctypes.c_int, [handle, number]),
        ("gguf_free", None, [handle]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    gguf = ggml.gguf_init_from_file(os.fsencode(path), _GgufInit(True, None))
    try:
        yield ggml, gguf
    finally:
        if gguf:
            ggml.gguf_free(gguf)


def _load(folder: Path) -> ctypes.CDLL:
    path = _require(folder)
    _refuse_foreign(folder)
    _point_llama_cpp_at(folder)
    import llama_cpp

    _check_llama_cpp(llama_cpp.llama_cpp._lib._name, folder)
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as exc:
        raise DFlashLibraryError(
            f"`{path}` does not load ({exc}): libdflash and libllama must come from the same build",
            hint=_BUILD_HINT,
        ) from None
    _check_version(lib, path)
    return lib


def _require(folder: Path) -> Path:
    """Return the path of libdflash; both libraries must be there."""
    if not folder.is_dir():
        origin = f" (from {LIB_PATH_VARIABLE})" if os.environ.get(LIB_PATH_VARIABLE) else ""
        raise DFlashLibraryError(
            f"no native libraries: the folder `{folder}`{origin} does not exist", hint=_BUILD_HINT
        )
    dflash, llama = find_library("dflash", folder), find_library("llama", folder)
    if llama is None:
        raise DFlashLibraryError(
            f"no native libraries: `{folder}` holds no libllama", hint=_BUILD_HINT
        )
    if dflash is None:
        raise DFlashLibraryError(
            f"`{folder}` holds a llama.cpp without libdflash, expected the build of this toolkit",
            hint=_BUILD_HINT,
        )
    return dflash


def _refuse_foreign(folder: Path) -> None:
    """Refuse to start when libraries of the same names are in the process already."""
    module = sys.modules.get("llama_cpp.llama_cpp")
    if module is not None:
        _check_llama_cpp(module._lib._name, folder)
    foreign = sorted(p for p in _mapped_libraries() if not _inside(p, folder))
    if foreign:
        listed = ", ".join(f"`{p}`" for p in foreign[:3])
        raise DFlashLibraryError(
            f"this process has already loaded {listed}, expected the ones in `{folder}`",
            hint="use DFlashLlama before any other package that brings its own ggml or llama.cpp, "
            "or in a process of its own",
        )


def _check_llama_cpp(name: str, folder: Path) -> None:
    used = Path(name)
    if not _inside(used, folder):
        raise DFlashLibraryError(
            f"`llama_cpp` was imported with `{used}`, expected the library in `{folder}`",
            hint="import dflash_cpp.DFlashLlama before llama_cpp, or set "
            f"LLAMA_CPP_LIB_PATH={folder} before Python starts",
        )


def _point_llama_cpp_at(folder: Path) -> None:
    """Set the variables that `llama_cpp` reads when it is imported, also for child processes."""
    variables = {"LLAMA_CPP_LIB_PATH": True, "MTMD_CPP_LIB": find_library("mtmd", folder)}
    for variable, wanted in variables.items():
        if not wanted:
            continue
        before = os.environ.get(variable)
        if before is not None and not _same(Path(before), folder):
            _log.info("%s was %s, now %s", variable, before, folder)
        os.environ[variable] = str(folder)


def _check_version(lib: ctypes.CDLL, path: Path) -> None:
    try:
        lib.dflash_api_version.restype = ctypes.c_int
        found = int(lib.dflash_api_version())
    except AttributeError:
        raise DFlashLibraryError(
            f"`{path}` has no dflash_api_version: it is not the libdflash of this toolkit",
            hint=_BUILD_HINT,
        ) from None
    if found != API_VERSION:
        raise DFlashLibraryError(
            f"`{path}` has version {found} of the C API, this package needs {API_VERSION}",
            hint=_BUILD_HINT,
        )


def _mapped_libraries() -> set[Path]:
    """Paths of llama.cpp's libraries in this process; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line.split(None, 5)[5] for line in lines if line.count("/")}
    return {Path(p) for p in paths if _NATIVE.fullmatch(p.rsplit("/", 1)[-1])}


def _inside(path: Path, folder: Path) -> bool:
    """Tell whether `path` is a file of `folder`, links followed on both sides."""
    if _same(path.parent, folder):
        return True
    try:
        files = list(folder.iterdir())
    except OSError:
        return False
    return any(_same(path, file) for file in files if file.is_symlink())


def _same(a: Path, b: Path) -> bool:
    try:
        return a.resolve() == b.resolve()
    except OSError:
        return False
