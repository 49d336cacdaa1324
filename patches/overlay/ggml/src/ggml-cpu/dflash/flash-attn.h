// Attention of few queries: what verifying a block, and decoding a token, consists of.
//
// Query rows that share a key-value head are taken a few at a time, so that keys and values are read and
// widened once for all of them; a row's operations are the same whatever rows are beside it.
#pragma once

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Computes a GGML_OP_FLASH_ATTN_EXT of up to 64 query positions over F16 or F32 keys and values, with all
// threads of the pool. Returns false, having done nothing, where the base has to: not available (see
// ggml_dflash_mul_mat_available), other types or shapes, ALiBi, soft cap, sinks.
bool ggml_dflash_flash_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
