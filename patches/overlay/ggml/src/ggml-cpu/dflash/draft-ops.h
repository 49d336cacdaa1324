// The graph nodes of a DFlash 2 draft (ggml-dflash.h) and top-k of few out of many.
#pragma once

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Functions of the nodes, for ggml_custom_4d(). Each thread does its share of channels or rows.
void ggml_dflash_conv   (struct ggml_tensor * dst, int ith, int nth, void * userdata);
void ggml_dflash_lattice(struct ggml_tensor * dst, int ith, int nth, void * userdata);

// One of the two by its name, null for any other name.
void * ggml_dflash_proc_address(const char * name);

// Computes a GGML_OP_TOP_K of k <= GGML_DFLASH_MAX_TOP_K with all threads of the pool: ids by descending
// value, equal values by ascending id, NaN as minus infinity. Returns false, having done nothing, where the
// base has to: larger k, strided rows, or GGML_DFLASH_DRAFT_OPS is 0.
bool ggml_dflash_top_k(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
