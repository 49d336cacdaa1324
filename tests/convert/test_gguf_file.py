"""Our header reader against gguf's, and against damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_convert.errors import InputError
from dflash_convert.gguf_file import read_gguf


@pytest.fixture(scope="session")
def every_type(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key of every type and tensors of several."""
    path = tmp_path_factory.mktemp("types") / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -5)
    writer.add_float32("a.f32", 0.1)
    writer.add_uint64("a.u64", 2**63 + 1)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.str", "grüße\n")
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 0.25])
    writer.add_array("a.bools", [True, False, True])
    writer.add_array("a.strs", ["", "x", "日本"])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.zeros((2, 3, 4), np.float16))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("three", gguf.quantize(np.ones((4, 64), np.float32), q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_same_as_gguf(path: Path) -> None:
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    names = [n for n in theirs.fields if not n.startswith("GGUF.")]
    assert list(ours.fields) == names
    for name in names:
        field = theirs.fields[name]
        assert ours.fields[name].value == field.contents()
        assert ours.fields[name].type == field.types[0]
        assert ours.fields[name].item_type == (field.types[1] if len(field.types) > 1 else None)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert info.type_id == tensor.tensor_type
        assert info.offset == tensor.data_offset
        assert info.nbytes == tensor.n_bytes


def test_same_as_gguf_reader_for_every_type(every_type: Path) -> None:
    check_same_as_gguf(every_type)


def test_same_as_gguf_reader_for_targets(target: Path, mrope_target: Path) -> None:
    check_same_as_gguf(target)
    check_same_as_gguf(mrope_target)


def test_token_texts_that_are_not_utf8_survive(tmp_path: Path) -> None:
    path = tmp_path / "bytes.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("t", [b"\xff\xfe", b"ok"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    field = read_gguf(path).fields["t"]
    assert field.raw == [b"\xff\xfe", b"ok"]
    assert field.value == ["\ufffd\ufffd", "ok"]


def test_every_truncation_of_the_header_is_an_input_error(every_type: Path, tmp_path: Path) -> None:
    whole = every_type.read_bytes()
    # The first tensor begins at most a padding after the header's last byte.
    header = read_gguf(every_type).tensors["one"].offset - 32
    part = tmp_path / "part.gguf"
    for length in range(0, header, 3):
        part.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"damaged or truncated|is empty|not a GGUF"):
            read_gguf(part)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 and so on", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(40), "more than fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(40), "more than fit"),
        (
            # An array that claims 2**60 strings must end at once.
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60) + bytes(40),
            "more than fit",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 2**60) + bytes(40),
            "needs 1152921504606846976 more",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(40), "does not exist"),
    ],
)
def test_hostile_headers(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=expected):
        read_gguf(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no GGUF file"):
        read_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(InputError, match="is a directory"):
        read_gguf(tmp_path)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers_never_fail_otherwise(
    every_type: Path, tmp_path: Path, data: st.DataObject
) -> None:
    raw = bytearray(every_type.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 900))] = data.draw(st.integers(0, 255))
    path = tmp_path / "mutated.gguf"
    path.write_bytes(raw)
    try:
        file = read_gguf(path)
    except InputError:
        return
    for field in file.fields.values():
        assert field.type_name
        _ = field.value
    file.truncated_tensors()
