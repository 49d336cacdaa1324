// The nodes of ggml-dflash.h on CUDA devices, and the k largest values of long rows.
#pragma once

#include "common.cuh"

// Whether the node is tagged and of types and shapes that ggml_cuda_dflash takes. Other codebook types than F32, F16,
// BF16, Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are not.
bool ggml_cuda_dflash_supported(const ggml_tensor * op);

// Computes a supported node on the context's stream.
void ggml_cuda_dflash(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// dst [k, n_rows] = ids of the k largest of each row of src [n_columns, n_rows], descending, ties by lower id, NaN as
// -infinity. Returns false, having done nothing, where the base has to: k above 64, short rows, or
// GGML_DFLASH_DRAFT_OPS=0 in the environment, for comparison.
bool ggml_cuda_dflash_top_k(ggml_backend_cuda_context & ctx, const float * src, int32_t * dst, int64_t n_columns,
                            int64_t n_rows, int64_t k);
