// Matrix products of few columns: what verifying a block of drafted tokens consists of.
//
// Each block of weights is read and unpacked once for all columns, and every result is computed in
// one order of operations whatever the number of columns: a token's activations have the same bits
// whether it is decoded alone, in a verification block or beside other slots' blocks.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Columns of src1 up to which the product is taken over; larger batches are the base's.
#define GGML_DFLASH_MUL_MAT_MAX_COLUMNS 64

// Whether there are kernels for this instruction set, and GGML_DFLASH_SMALL_BATCH is not 0. The CPU
// backend lists it as its feature DFLASH_SMALL_BATCH.
bool ggml_dflash_mul_mat_available(void);

// Work buffer in bytes that the product needs; 0 where it is the base's.
size_t ggml_dflash_mul_mat_work_size(const struct ggml_tensor * dst);

// Computes dst = src0 x src1 (src0 rows as they lie in the file) with all threads of the pool.
// Returns false, having done nothing, where the base has to: not available, other types, shapes or
// batch sizes.
bool ggml_dflash_mul_mat(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// The same for weights that the base has interleaved (block_q4_0x4, block_q4_Kx8, ...): so many bytes of
// each of so many rows stand together.
bool ggml_dflash_mul_mat_interleaved(
    const struct ggml_compute_params * params, struct ggml_tensor * dst, int bytes, int rows);

// Whether attention of a single query must go through all its keys in one piece, as it does for
// several queries, instead of in one part per thread: where there are heads enough for the threads.
bool ggml_dflash_whole_keys(int64_t n_heads, int n_threads);

#ifdef __cplusplus
}
#endif
