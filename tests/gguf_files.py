"""Read GGUF files as numbers, and copy them with some keys and tensors changed.

Changed copies are for planted faults and for drafts that carry tensors which they usually borrow.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping


class GGUFFile:
    """Metadata and dequantised tensors of a GGUF file."""

    def __init__(self, path: Path | str) -> None:
        self._reader = gguf.GGUFReader(str(path))
        self.tensors = {t.name: t for t in self._reader.tensors}
        self.arch: str = self.field("general.architecture")

    def field(self, key: str, default: Any = None) -> Any:
        """Value of a key; `{arch}` stands for the architecture's prefix."""
        found = self._reader.get_field(key.replace("{arch}", getattr(self, "arch", "")))
        return default if found is None else found.contents()

    def keys(self, prefix: str) -> list[str]:
        """Names of the metadata keys that start with `prefix`."""
        return [key for key in self._reader.fields if key.startswith(prefix)]

    def values(self, name: str) -> np.ndarray:
        """F32 values of a tensor, [n_out, n_in] for a matrix."""
        tensor = self.tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def edit_gguf(
    source: Path | str,
    out: Path | str,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Path:
    """Write `out` as a changed copy of `source`.

    Args:
        keys: new values; a key keeps its type, None removes it, a new key takes the type of the
            Python value.
        tensors: new F32 values, stored as F32; None removes the tensor.
        rename: tensor names to change; applied to the names in `source`.
    """
    reader = gguf.GGUFReader(str(source))
    out = Path(out)
    part = out.with_name(out.name + ".part")
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(part, arch)
    changed = dict(keys or {})
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = changed.pop(name) if name in changed else entry.contents()
        if value is not None:
            item = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, entry.types[0], item)
    for name, value in changed.items():
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            item = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(name, value, kind, item)
    replaced = dict(tensors or {})
    for tensor in reader.tensors:
        name = (rename or {}).get(tensor.name, tensor.name)
        if name not in replaced:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
        elif (values := replaced.pop(name)) is not None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    for name, values in replaced.items():
        if values is not None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, out)
    return out
