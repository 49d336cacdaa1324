"""ctypes for `dflash.h`, in the header's order, each prototype above its binding.

A test reads the header and compares names, arguments, struct members and enum values with this.
"""

# The structs keep their C names.
# ruff: noqa: N801

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from functools import lru_cache
from typing import Any

from .errors import status_error

# #define DFLASH_API_VERSION 3
DFLASH_API_VERSION = 3

# #define DFLASH_MAX_DRAFT 63
DFLASH_MAX_DRAFT = 63

# enum dflash_status
DFLASH_OK = 0
DFLASH_E_ARGUMENT = 1
DFLASH_E_FILE = 2
DFLASH_E_PAIR = 3
DFLASH_E_TARGET = 4
DFLASH_E_MEMORY = 5
DFLASH_E_DECODE = 6
DFLASH_E_INTERNAL = 7

# enum dflash_verify
DFLASH_VERIFY_AUTO = 0
DFLASH_VERIFY_REJECT = 1
DFLASH_VERIFY_MATCH = 2

# from llama.h
llama_token = c_int32
llama_pos = c_int32
llama_context_p = c_void_p
llama_model_p = c_void_p
llama_sampler_p = c_void_p

dflash_session_p = c_void_p


class dflash_params(Structure):
    """struct dflash_params"""

    _fields_ = [
        ("size", c_size_t),
        ("n_draft", c_int32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("n_gpu_layers", c_int32),
        ("p_min", c_float),
        ("use_mmap", c_bool),
        ("trace", c_bool),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("flash_attn", c_int32),
        ("verify", c_int32),
        ("adaptive", c_bool),
    ]


class dflash_stats(Structure):
    """struct dflash_stats"""

    _fields_ = [
        ("size", c_size_t),
        ("n_rounds", c_int64),
        ("n_plain", c_int64),
        ("n_drafted", c_int64),
        ("n_accepted", c_int64),
        ("n_emitted", c_int64),
        ("n_replayed", c_int64),
        ("n_invalid", c_int64),
        ("n_prompt", c_int64),
        ("n_injected", c_int64),
        ("t_prompt_ms", c_double),
        ("t_inject_ms", c_double),
        ("t_draft_ms", c_double),
        ("t_verify_ms", c_double),
        ("t_sample_ms", c_double),
        ("n_drafted_per_pos", c_int64 * DFLASH_MAX_DRAFT),
        ("n_accepted_per_pos", c_int64 * DFLASH_MAX_DRAFT),
        ("n_rounds_reject", c_int64),
        ("n_rounds_greedy", c_int64),
        ("n_visited", c_int64),
        ("sum_overlap", c_double),
        ("sum_top", c_double),
        ("sum_reach", c_double),
        ("n_skipped", c_int64),
        ("pace_plain_ms", c_double),
        ("pace_draft_ms", c_double),
        ("pace_gain_ms", c_double),
    ]


class dflash_trace(Structure):
    """struct dflash_trace"""

    _fields_ = [
        ("size", c_size_t),
        ("n_pos", c_int32),
        ("n_draft", c_int32),
        ("n_accepted", c_int32),
        ("n_top_k", c_int32),
        ("n_embd", c_int32),
        ("n_vocab", c_int32),
        ("pos", llama_pos),
        ("anchor", llama_token),
        ("draft", POINTER(llama_token)),
        ("candidates", POINTER(llama_token)),
        ("scores", POINTER(c_float)),
        ("lattice", POINTER(c_float)),
        ("hidden", POINTER(c_float)),
        ("logits", POINTER(c_float)),
    ]


# name, result, arguments
PROTOTYPES: list[tuple[str, Any, list[Any]]] = [
    # const char * dflash_last_error(void);
    ("dflash_last_error", c_char_p, []),
    # const char * dflash_status_name(int status);
    ("dflash_status_name", c_char_p, [c_int]),
    # int dflash_api_version(void);
    ("dflash_api_version", c_int, []),
    # const char * dflash_build_info(void);
    ("dflash_build_info", c_char_p, []),
    # int dflash_check_pair(const char * target_path, const char * draft_path);
    ("dflash_check_pair", c_int, [c_char_p, c_char_p]),
    # int dflash_check_model(const struct llama_model * target, const char * draft_path);
    ("dflash_check_model", c_int, [llama_model_p, c_char_p]),
    # struct dflash_params dflash_params_default(void);
    ("dflash_params_default", dflash_params, []),
    # int dflash_session_open(struct llama_context * target, const char * draft_path,
    #         const struct dflash_params * params, struct dflash_session ** out);
    (
        "dflash_session_open",
        c_int,
        [llama_context_p, c_char_p, POINTER(dflash_params), POINTER(dflash_session_p)],
    ),
    # void dflash_session_close(struct dflash_session * session);
    ("dflash_session_close", None, [dflash_session_p]),
    # int32_t dflash_session_n_draft(const struct dflash_session * session);
    ("dflash_session_n_draft", c_int32, [dflash_session_p]),
    # int32_t dflash_session_block_size(const struct dflash_session * session);
    ("dflash_session_block_size", c_int32, [dflash_session_p]),
    # int32_t dflash_session_n_past(const struct dflash_session * session);
    ("dflash_session_n_past", c_int32, [dflash_session_p]),
    # int dflash_session_set_adaptive(struct dflash_session * session, bool adaptive);
    ("dflash_session_set_adaptive", c_int, [dflash_session_p, c_bool]),
    # int dflash_session_rollback(struct dflash_session * session, int32_t n_keep);
    ("dflash_session_rollback", c_int, [dflash_session_p, c_int32]),
    # int dflash_session_prompt(struct dflash_session * session, const llama_token * tokens,
    #         int32_t n_tokens);
    ("dflash_session_prompt", c_int, [dflash_session_p, POINTER(llama_token), c_int32]),
    # int dflash_session_decoded(struct dflash_session * session, int32_t n_tokens);
    ("dflash_session_decoded", c_int, [dflash_session_p, c_int32]),
    # int dflash_session_step(struct dflash_session * session, struct llama_sampler * sampler,
    #         llama_token id_last, int32_t n_draft_max, llama_token * out, int32_t capacity,
    #         int32_t * n_out);
    (
        "dflash_session_step",
        c_int,
        [
            dflash_session_p,
            llama_sampler_p,
            llama_token,
            c_int32,
            POINTER(llama_token),
            c_int32,
            POINTER(c_int32),
        ],
    ),
    # int dflash_session_stats(const struct dflash_session * session, struct dflash_stats * stats);
    ("dflash_session_stats", c_int, [dflash_session_p, POINTER(dflash_stats)]),
    # int dflash_session_stats_reset(struct dflash_session * session);
    ("dflash_session_stats_reset", c_int, [dflash_session_p]),
    # int dflash_session_trace(const struct dflash_session * session, struct dflash_trace * trace);
    ("dflash_session_trace", c_int, [dflash_session_p, POINTER(dflash_trace)]),
]


def bind(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Give every function of `lib` its prototype; returns `lib`."""
    for name, result, arguments in PROTOTYPES:
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


@lru_cache(maxsize=1)
def api() -> ctypes.CDLL:
    """Return libdflash with prototypes; see `_libs.load` for the errors."""
    from . import _libs

    return bind(_libs.load())


def check(status: int) -> None:
    """Raise the exception for a status other than DFLASH_OK."""
    if status != DFLASH_OK:
        text = api().dflash_last_error() or b""
        raise status_error(status, text.decode("utf-8", errors="replace"))
