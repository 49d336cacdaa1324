"""Stream a plan into a GGUF: never more than a few pieces in memory, and all or nothing on disk."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import SourceTensor
from .console import Ticker, human_bytes
from .errors import FailureError, InputError
from .gguf_file import Field
from .plan import Plan, PlannedKey, PlannedTensor
from .pool import PIECE, Workers, workers
from .quantize import deinterleave, encode
from .schema import ARCH

if TYPE_CHECKING:
    import numpy as np

# File systems without hard links answer with one of these.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


@contextmanager
def new_file(path: Path, *, force: bool, nbytes: int) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which becomes `path` when the block ends well.

    Whatever ends the block otherwise (an error, Ctrl-C, SIGTERM) leaves nothing behind.

    Args:
        force: Replace a file that exists.
        nbytes: Space that is needed.

    Raises:
        InputError: `path` exists or its directory does not.
        FailureError: Not enough space.
    """
    check_output(path, force=force, nbytes=nbytes)
    part = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        yield part
        _publish(part, path, force)
    finally:
        part.unlink(missing_ok=True)


def check_output(path: Path, *, force: bool, nbytes: int = 0) -> None:
    """Check that `path` can be written to.

    Args:
        force: Replace a file that exists.
        nbytes: Space that is needed.

    Raises:
        InputError: It exists (unless `force`), is a directory, or has no directory to be in.
        FailureError: Not enough space.
    """
    if path.is_dir():
        raise InputError(f"`{path}` is a directory, expected a file name")
    if path.exists() and not force:
        raise InputError(f"`{path}` exists", hint="add `--force` to replace it")
    if not path.parent.is_dir():
        raise InputError(f"no directory `{path.parent}` to write to", hint="create it first")
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise FailureError(
            f"`{path.parent}` has {human_bytes(free)} free, the file needs {human_bytes(nbytes)}"
        )


def _publish(part: Path, path: Path, force: bool) -> None:
    if not force:
        try:
            # Unlike a rename, a link never replaces a file that appeared meanwhile.
            os.link(part, path)
            return
        except FileExistsError:
            raise InputError(f"`{path}` exists", hint="add `--force` to replace it") from None
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
    os.replace(part, path)


class _Stored(bytes):
    """Bytes of a value in GGUF form, copied from another file."""


class _Streamed:
    """What GGUFWriter takes for an array, but made piece by piece while it is written.

    Attributes:
        checksums: CRC-32 of each piece that was written.
    """

    def __init__(self, tensor: PlannedTensor, pool: Workers, ticker: Ticker):
        self.nbytes = tensor.nbytes
        self.checksums: list[int] = []
        self._tensor = tensor
        self._pool = pool
        self._ticker = ticker

    def tofile(self, stream: Any) -> None:
        """Write all bytes to `stream`."""
        tensor = self._tensor
        if tensor.values is not None:
            stream.write(tensor.values.tobytes())
            return

        def make(piece: tuple[int, int]) -> tuple[memoryview, int]:
            encoded = memoryview(make_piece(tensor, *piece)).cast("B")  # type: ignore[arg-type]
            return encoded, zlib.crc32(encoded)

        for encoded, checksum in self._pool.ordered(make, pieces(tensor)):
            stream.write(encoded)
            self.checksums.append(checksum)
            self._ticker.advance(encoded.nbytes)


def pieces(tensor: PlannedTensor) -> Iterator[tuple[int, int]]:
    """Cut a planned tensor into (start, count) pieces of whole rows (of whole heads if need be)."""
    source = _source(tensor)
    heads = tensor.head_dim if tensor.head_dim and len(source.shape) == 2 else 1
    return source.pieces(PIECE, multiple=heads)


def read_piece(tensor: PlannedTensor, start: int, count: int) -> np.ndarray:
    """Read a piece of the source, in the order of the GGUF, as stored."""
    source = _source(tensor)
    stored = source.read(start, count)
    if tensor.head_dim:
        width = source.row if len(source.shape) == 2 else 1
        stored = deinterleave(stored, tensor.head_dim, width)
    return stored


def make_piece(tensor: PlannedTensor, start: int, count: int) -> np.ndarray:
    """Read and encode a piece; the bytes of the result go into the file."""
    import numpy as np

    source = _source(tensor)
    stored = read_piece(tensor, start, count)
    return np.ascontiguousarray(encode(stored, source.dtype, tensor.out, source.row))


def _source(tensor: PlannedTensor) -> SourceTensor:
    assert tensor.source is not None
    return tensor.source


def write_gguf(
    plan: Plan, path: Path, ticker: Ticker, threads: int | None = None
) -> dict[str, list[int]]:
    """Write a planned GGUF to `path`; see `write_tensors`."""
    return write_tensors(path, ARCH, plan.keys, plan.tensors, ticker, threads)


def write_tensors(
    path: Path,
    arch: str,
    keys: Sequence[PlannedKey],
    tensors: Sequence[PlannedTensor],
    ticker: Ticker,
    threads: int | None = None,
) -> dict[str, list[int]]:
    """Write a GGUF to `path` and flush it to the disk.

    Args:
        arch: `general.architecture`.
        ticker: Told the bytes that were written.
        threads: Number of threads; None for one per core.

    Returns:
        For each tensor that was read from the checkpoint the CRC-32 of its `pieces` as written.
    """
    from gguf import GGUFValueType, GGUFWriter

    class Writer(GGUFWriter):
        # The one addition: values in GGUF form pass as they are, so that a tokenizer is copied
        # byte for byte (its texts need not be UTF-8) and without packing each token anew.
        def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
            if isinstance(val, _Stored):
                return self._pack("I", vtype) + val
            return super()._pack_val(val, vtype, add_vtype, sub_type)

    import numpy as np

    types = {
        "u32": GGUFValueType.UINT32,
        "i32": GGUFValueType.INT32,
        "f32": GGUFValueType.FLOAT32,
        "bool": GGUFValueType.BOOL,
        "str": GGUFValueType.STRING,
    }

    def add(key: PlannedKey) -> None:
        if isinstance(key.field, Field):
            stored = _Stored(key.field.payload)
            writer.add_key_value(key.name, stored, GGUFValueType(key.field.type))
        elif key.type.endswith("[]"):
            item = types[key.type[:-2]]
            writer.add_key_value(key.name, list(key.value), GGUFValueType.ARRAY, item)
        else:
            writer.add_key_value(key.name, key.value, types[key.type])

    writer = Writer(path, arch)
    try:
        for key in keys:
            add(key)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name,
                tensor.shape,
                np.dtype(np.float32),  # only looked at for raw bytes
                tensor.nbytes,
                # The package may not know the number, and only packs it.
                raw_dtype=tensor.out.type_id,  # type: ignore[arg-type]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        checksums = {}
        with workers(threads) as pool:
            for tensor in tensors:
                streamed = _Streamed(tensor, pool, ticker)
                writer.write_tensor_data(streamed)  # type: ignore[arg-type]
                checksums[tensor.name] = streamed.checksums
        for stream in writer.fout or ():
            stream.flush()
            os.fsync(stream.fileno())
        return checksums
    finally:
        writer.close()
