"""Child process of tests/runtime/test_fuzz_draft.py: damaged drafts into the loader, one by one.

    fuzz_draft.py TARGET DRAFT FOLDER SEED FIRST LAST

Prints `case`, its number and what was damaged before each case, and `end refused`, `end failed` or
`end ran` after it, so that whoever reads the output knows what a crash belongs to.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

INTS = (0, 1, 2, 3, 7, 8, 16, 63, 64, 65, 255, 1000, 65536, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))
KINDS = gguf.GGUFValueType
SIZES = {
    KINDS.UINT8: 8, KINDS.INT8: 8, KINDS.UINT16: 16, KINDS.INT16: 16, KINDS.UINT32: 32,
    KINDS.INT32: 32, KINDS.UINT64: 64, KINDS.INT64: 64,
}  # fmt: skip
SIGNED = (KINDS.INT8, KINDS.INT16, KINDS.INT32, KINDS.INT64)


def fit(value: int, kind: gguf.GGUFValueType) -> int:
    """The value's low bits as a number of that type."""
    bits = SIZES[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind in SIGNED and value >> (bits - 1) else value


class Mutator:
    """Damaged copies of one draft; case i of a seed is always the same."""

    def __init__(self, source: Path, seed: int) -> None:
        reader = gguf.GGUFReader(str(source))
        self.raw = source.read_bytes()
        self.seed = seed
        self.keys: dict[str, tuple[Any, Any, Any]] = {}
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                item = field.types[-1] if field.types[0] == KINDS.ARRAY else None
                self.keys[name] = (field.contents(), field.types[0], item)
        self.tensors = {
            t.name: (np.array(t.data), t.tensor_type, [int(n) for n in t.shape])
            for t in reader.tensors
        }
        self.data_start = min(int(t.data_offset) for t in reader.tensors)
        # what the draft's own loader reads, not the long lists of the tokenizer
        self.interesting = [k for k in self.keys if not k.startswith(("tokenizer.ggml.m", "gen"))]

    def write(self, case: int, path: Path) -> str:
        """Write case number `case` to `path`; returns what was done."""
        rng = random.Random(self.seed * 1_000_003 + case)
        how = rng.choice((self._key, self._key, self._key, self._tensor, self._tensor, self._bytes))
        return how(rng, path)

    def _bytes(self, rng: random.Random, path: Path) -> str:
        raw = bytearray(self.raw)
        if rng.random() < 0.3:
            cut = rng.randrange(len(raw))
            path.write_bytes(raw[:cut])
            return f"cut at byte {cut}"
        said = []
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(self.data_start)
            width = rng.choice((1, 4, 8))
            value = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)))
            raw[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
            said.append(f"{at}+{width}")
        path.write_bytes(raw)
        return "bytes " + " ".join(said)

    def _key(self, rng: random.Random, path: Path) -> str:
        keys = dict(self.keys)
        said = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            name = rng.choice([k for k in self.interesting if k in keys])
            value, kind, item = keys[name]
            if rng.random() < 0.15:
                del keys[name]
                said.append(f"no {name}")
                continue
            if rng.random() < 0.2:  # another type
                value, kind, item = rng.choice(
                    (
                        ("text", KINDS.STRING, None), (True, KINDS.BOOL, None),
                        (1.5, KINDS.FLOAT32, None), (7, KINDS.UINT64, None), (-7, KINDS.INT8, None),
                        ([1, 2, 3], KINDS.ARRAY, KINDS.INT32), (["a"], KINDS.ARRAY, KINDS.STRING),
                        ([True], KINDS.ARRAY, KINDS.BOOL), ([0.5] * 4, KINDS.ARRAY, KINDS.FLOAT32),
                    )
                )  # fmt: skip
            elif kind in SIZES:
                value = fit(rng.choice((*INTS, value + 1, value - 1, value * 2, -1)), kind)
            elif kind in (KINDS.FLOAT32, KINDS.FLOAT64):
                value = rng.choice(FLOATS)
            elif kind == KINDS.BOOL:
                value = not value
            elif kind == KINDS.STRING:
                value = rng.choice(("", "x" * 3000, "llama", "dflash", "\u2603"))
            else:
                value = list(value)
                change = rng.randrange(4)
                if change == 0:
                    value = value[: rng.randrange(1, max(2, len(value)))]
                elif change == 1:
                    value = value + value[:1] * rng.choice((1, 600))
                elif item in SIZES:
                    value[rng.randrange(len(value))] = fit(rng.choice((*INTS, -1)), item)
                elif item == KINDS.BOOL:
                    at = rng.randrange(len(value))
                    value[at] = not value[at]
                else:
                    value.reverse()
            keys[name] = (value, kind, item)
            said.append(f"{name} = {str(value)[:40]} ({kind.name})")
        self._save(path, keys, self.tensors)
        return "; ".join(said)

    def _tensor(self, rng: random.Random, path: Path) -> str:
        tensors = dict(self.tensors)
        said = []
        for _ in range(rng.choice((1, 1, 2))):
            name = rng.choice(list(tensors))
            data, kind, shape = tensors[name]
            change = rng.randrange(7)
            if change == 0:
                del tensors[name]
                said.append(f"no {name}")
                continue
            if change == 1:
                tensors[name + ".x"] = tensors.pop(name)
                said.append(f"{name} renamed")
                continue
            if change == 2 and len(shape) > 1:
                data = np.ascontiguousarray(data.T)
            elif change == 3:
                data = data[: max(1, len(data) // 2)]
            elif change == 4:
                data = np.concatenate([data, data[:1]])
            elif change == 5 and data.dtype == np.float32:
                data = data.copy()
                data.reshape(-1)[rng.randrange(data.size)] = rng.choice(FLOATS)
            elif change == 6:
                other = rng.choice((np.float16, np.int32, np.int8, np.float64))
                with np.errstate(all="ignore"):
                    data = data.astype(other)
                names = {np.float16: "F16", np.int32: "I32", np.int8: "I8", np.float64: "F64"}
                kind = gguf.GGMLQuantizationType[names[other]]
            else:
                partner = rng.choice(list(tensors))
                tensors[name], tensors[partner] = tensors[partner], tensors[name]
                said.append(f"{name} and {partner} swapped")
                continue
            tensors[name] = (data, kind, shape)
            said.append(f"{name} {data.dtype} {data.shape}")
        self._save(path, self.keys, tensors)
        return "; ".join(said)

    def _save(self, path: Path, keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        writer = gguf.GGUFWriter(path, "dflash")
        for name, (value, kind, item) in keys.items():
            writer.add_key_value(name, value, kind, item)
        for name, (data, kind, _) in tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def main() -> None:
    """Run the cases."""
    target, draft, folder = (Path(a) for a in sys.argv[1:4])
    seed, first, last = (int(a) for a in sys.argv[4:7])
    sys.path.insert(0, str(Path(__file__).parent))
    from our_pair import OurPair

    from dflash_cpp.errors import DFlashError
    from dflash_cpp.session import check_pair

    mutator = Mutator(draft, seed)
    path = folder / f"case-{first}.gguf"
    job = {"target": str(target), "draft": str(path), "n_ctx": 256, "n_batch": 64}
    for case in range(first, last):
        print(f"case {case} {mutator.write(case, path)}", flush=True)
        try:
            check_pair(target, path)
        except DFlashError:
            print("end refused", flush=True)
            continue
        try:
            with OurPair(job, trace=False) as ours:
                ours.generate(list(range(40, 60)), 8)
        except DFlashError:
            print("end failed", flush=True)
        else:
            print("end ran", flush=True)


if __name__ == "__main__":
    main()
