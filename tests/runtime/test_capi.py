"""The ctypes layer against the header: names, arguments, members, values, sizes, misuse."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash_cpp import _capi, _libs, errors

_POINTED = {
    "char": ctypes.c_char_p,
    "struct llama_model": ctypes.c_void_p,
    "struct llama_context": ctypes.c_void_p,
    "struct llama_sampler": ctypes.c_void_p,
    "struct dflash_session": ctypes.c_void_p,
    "struct dflash_session *": ctypes.POINTER(ctypes.c_void_p),
    "struct dflash_params": ctypes.POINTER(_capi.dflash_params),
    "struct dflash_stats": ctypes.POINTER(_capi.dflash_stats),
    "struct dflash_trace": ctypes.POINTER(_capi.dflash_trace),
    "llama_token": ctypes.POINTER(ctypes.c_int32),
    "int32_t": ctypes.POINTER(ctypes.c_int32),
    "float": ctypes.POINTER(ctypes.c_float),
}
_PLAIN = {
    "void": None,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "llama_token": ctypes.c_int32,
    "llama_pos": ctypes.c_int32,
    "struct dflash_params": _capi.dflash_params,
}


@dataclass
class Header:
    """What the header declares, in its order."""

    functions: list[tuple[str, Any, list[Any]]] = field(default_factory=list)
    structs: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    enums: dict[str, int] = field(default_factory=dict)
    defines: dict[str, int] = field(default_factory=dict)


def c_type(text: str) -> Any:
    """The ctypes type of a C type without its name."""
    words = " ".join(w for w in text.replace("*", " * ").split() if w != "const")
    if words.endswith("*"):
        return _POINTED[words[:-1].strip()]
    return _PLAIN[words]


def split_name(text: str) -> tuple[str, str]:
    """Type and name of a declaration."""
    match = re.fullmatch(r"(.*?)(\w+)", text.strip(), re.S)
    assert match, text
    return match[1], match[2]


def parse(text: str) -> Header:
    header = Header()
    text = re.sub(r"//[^\n]*", "", text)
    for name, value in re.findall(r"^#define (DFLASH_\w+) +(\d+)$", text, re.M):
        header.defines[name] = int(value)
    text = re.sub(r"^#[^\n]*(?:\\\n[^\n]*)*$", "", text, flags=re.M)
    for body in re.findall(r"enum \w+ \{(.*?)\};", text, re.S):
        for name, value in re.findall(r"(\w+)\s*=\s*(\d+)", body):
            header.enums[name] = int(value)
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.S):
        members = []
        for part in filter(None, (p.strip() for p in body.split(";"))):
            array = re.fullmatch(r"(.*)\[(\w+)\]", part, re.S)
            kind, member = split_name(array[1] if array else part)
            length = header.defines[array[2]] if array else None
            members.append((member, c_type(kind) * length if length else c_type(kind)))
        header.structs[name] = members
    for declaration in re.findall(r"DFLASH_API\s+([^;{]*\));", text):
        head, arguments = declaration.strip()[:-1].split("(", 1)
        result, name = split_name(head)
        parts = [p.strip() for p in arguments.split(",")]
        types = [] if parts == ["void"] else [c_type(split_name(p)[0]) for p in parts]
        header.functions.append((name, c_type(result), types))
    return header


def differences(header: Header) -> list[str]:
    """Everything in which `_capi` differs from the header."""
    found = []
    ours = _capi.PROTOTYPES
    if [f[0] for f in header.functions] != [f[0] for f in ours]:
        found.append(f"functions: {[f[0] for f in header.functions]}")
    by_name = {f[0]: f for f in ours}
    for name, result, arguments in header.functions:
        if name in by_name and by_name[name] != (name, result, arguments):
            found.append(f"{name}: {result} {arguments}, bound as {by_name[name][1:]}")
    for name, members in header.structs.items():
        bound = getattr(_capi, name, None)
        if bound is None or list(bound._fields_) != members:
            found.append(f"struct {name}: {members}")
    for name, value in (header.enums | header.defines).items():
        if getattr(_capi, name, None) != value:
            found.append(f"{name} = {value}")
    return found


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "patches/overlay/dflash/include/dflash.h").read_text(encoding="utf-8")


def test_bindings_equal_header(text: str) -> None:
    header = parse(text)
    assert len(header.functions) == text.count("DFLASH_API ") - text.count("define DFLASH_API ")
    assert set(header.structs) == {"dflash_params", "dflash_stats", "dflash_trace"}
    assert differences(header) == []


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("int32_t n_threads; ", "float n_threads; ", "dflash_params"),
        ("int64_t n_plain; ", "", "dflash_stats"),
        ("n_draft;    // tokens proposed", "n_proposed; // tokens proposed", "dflash_trace"),
        ("DFLASH_E_MEMORY     = 5", "DFLASH_E_MEMORY     = 9", "DFLASH_E_MEMORY"),
        ("#define DFLASH_MAX_DRAFT 63", "#define DFLASH_MAX_DRAFT 31", "DFLASH_MAX_DRAFT"),
        ("rollback(struct dflash_session * session, int32_t", "rollback(int32_t", "rollback"),
        ("int32_t                 n_draft_max", "size_t n_draft_max", "dflash_session_step"),
        ("DFLASH_API int dflash_api_version(void);", "", "functions"),
    ],
)
def test_comparison_notices(text: str, old: str, new: str, names: str) -> None:
    squeezed = re.sub(r" {2,}", " ", text) if old not in text else text
    assert old in squeezed, "the header changed: adapt this test"
    found = differences(parse(squeezed.replace(old, new, 1)))
    assert any(names in line for line in found), found


def test_every_status_has_its_exception(text: str) -> None:
    codes = {v: k for k, v in parse(text).enums.items() if v and k.startswith("DFLASH_E_")}
    assert set(codes) == set(errors.STATUS_ERRORS)
    for code, name in codes.items():
        kind = errors.STATUS_ERRORS[code].__name__
        assert kind.lower() == f"dflash{name.removeprefix('DFLASH_E_').lower()}error"


def test_status_error_splits_reasons() -> None:
    exc = errors.status_error(3, "hidden size 8, expected 16\nvocabulary 5, expected 6\n")
    assert isinstance(exc, errors.DFlashPairError)
    assert exc.reasons == ["hidden size 8, expected 16", "vocabulary 5, expected 6"]
    assert "vocabulary 5" in str(exc)
    assert exc.exit_code == 2
    assert isinstance(errors.status_error(99, ""), errors.DFlashInternalError)


def test_api_version_is_the_headers(text: str) -> None:
    assert parse(text).defines["DFLASH_API_VERSION"] == _libs.API_VERSION


@pytest.fixture(scope="module")
def api() -> ctypes.CDLL:
    if _libs.find_library("dflash") is None:
        pytest.skip(f"no libdflash in {_libs.library_dir()}; run `make build`")
    return _capi.api()


@pytest.mark.native
class TestLibrary:
    def test_version_and_names(self, api: ctypes.CDLL) -> None:
        assert api.dflash_api_version() == _capi.DFLASH_API_VERSION
        names = [api.dflash_status_name(i).decode() for i in range(8)]
        assert names[1:] == [
            "argument",
            "file",
            "pair",
            "target",
            "memory",
            "decode",
            "internal",
        ]
        assert api.dflash_status_name(1000) == b"unknown"

    def test_sizes(self, api: ctypes.CDLL) -> None:
        params = api.dflash_params_default()
        assert params.size == ctypes.sizeof(_capi.dflash_params)
        assert params.use_mmap is True
        assert params.n_gpu_layers < 0

    def test_null_arguments_are_errors(self, api: ctypes.CDLL) -> None:
        out, n_out = _capi.dflash_session_p(), ctypes.c_int32()
        token = (ctypes.c_int32 * 1)(1)
        stats, trace = _capi.dflash_stats(), _capi.dflash_trace()
        calls = [
            api.dflash_check_pair(None, None),
            api.dflash_check_model(None, None),
            api.dflash_session_open(None, b"x", None, ctypes.byref(out)),
            api.dflash_session_open(None, b"x", None, None),
            api.dflash_session_rollback(None, 0),
            api.dflash_session_prompt(None, token, 1),
            api.dflash_session_decoded(None, 1),
            api.dflash_session_step(None, None, 1, -1, token, 1, ctypes.byref(n_out)),
            api.dflash_session_stats(None, ctypes.byref(stats)),
            api.dflash_session_stats_reset(None),
            api.dflash_session_trace(None, ctypes.byref(trace)),
        ]
        assert calls == [_capi.DFLASH_E_ARGUMENT] * len(calls)
        assert api.dflash_last_error()
        api.dflash_session_close(None)
        assert api.dflash_session_n_past(None) == 0

    def test_missing_file_is_named(self, api: ctypes.CDLL, tmp_path: Path) -> None:
        path = tmp_path / "no-such.gguf"
        with pytest.raises(errors.DFlashFileError, match=r"no-such\.gguf"):
            _capi.check(api.dflash_check_pair(bytes(path), bytes(path)))
