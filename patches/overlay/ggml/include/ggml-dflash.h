// What a DFlash 2 draft computes besides ordinary layers, as single nodes of a graph.
//
// The nodes are GGML_OP_CUSTOM with a tag behind the custom op's own parameters. Nothing is renumbered, so graphs that leave
// the process and libraries of other builds are not affected. A backend that knows the tag computes the node in its own way;
// the CPU backend calls the function in the node. Backends that do neither do not support the node: whoever builds a graph asks
// them first (ggml_backend_dev_supports_op) and builds the same from ordinary operations instead. Never emit these nodes
// for RPC devices, which claim to support everything, or for split (meta) devices.
//
// Two nodes; T tokens in blocks of equal length, one after another, the first token of a block is its anchor:
//
// convolution     dst[c, i] = residual[c, i] + sum over t < n_taps of
//                             (base[c, t, side] + dynamic[side*n_taps*G + t*G + c / group, i]) * x[c, i - t]
//     terms with i - t before the start of i's block are left out
//     src0 x         F32 [H, T], rows may be strided
//     src1 dynamic   F32 [2*n_taps*G, T], rows may be strided; G = H / group
//     src2 base      F32, F16 or BF16 [H, n_taps, 2], contiguous
//     src3 residual  F32 [H, T], rows may be strided; optional
//     dst            F32 [H, T]
//     Order of operations: base + dynamic, times x, rounded after each; taps ascending; the residual last.
//
// lattice         scores of every candidate after every candidate of the position before
//     src0 logits    F32 [V, R]; R = n_drafted * n_blocks, row r is position 1 + r % n_drafted of block r / n_drafted
//     src1 candidates I32 [k, R], ids into the V logits, distinct within a row
//     src2 gate      F32 [rank, R]
//     src3 predecessors, src4 successors: codebooks [rank, >= V] of one type each
//     src5 tokens    I32 [T], T = n_tokens * n_blocks
//     src6 names     I64 [V], contiguous: token ids of the logits, where these are of some tokens only; optional. Candidates
//                    are ids into the logits, everything below is about tokens, all of which the codebooks have
//     dst            F32 [width, T], width >= k + k*k: for token p of a block, 1 <= p <= n_drafted:
//         [c]            id of candidate c
//         [k + j*k + c]  logit of c + sum over r of predecessor[id of j][r] * gate[r] * successor[id of c][r]
//                        where j is a candidate of position p - 1; at p = 1 the anchor, whatever j is
//                    everything else is 0

#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_DFLASH_MAX_TOP_K 64

enum ggml_dflash_kind {
    GGML_DFLASH_NONE    = 0,
    GGML_DFLASH_CONV    = 1,
    GGML_DFLASH_LATTICE = 2,
};

// Lies in op_params from GGML_DFLASH_TAG_AT on. The same bytes for the same graph, step after step.
struct ggml_dflash_tag {
    int32_t magic;
    int32_t kind;      // enum ggml_dflash_kind
    int32_t n_tokens;  // of a block, its anchor included
    int32_t n_drafted; // lattice: positions of a block that are scored, < n_tokens
    int32_t n_taps;    // convolution
    int32_t group;     // convolution: channels that share a dynamic coefficient
    int32_t side;      // convolution: 0 before the sublayer, 1 after it
    int32_t reserved;
};

#define GGML_DFLASH_MAGIC  0x44464c32 // "DFL2"
#define GGML_DFLASH_TAG_AT 32         // bytes; the custom op uses the first 24

// The tag of a node; kind is GGML_DFLASH_NONE if it has none.
static inline struct ggml_dflash_tag ggml_dflash_get_tag(const struct ggml_tensor * node) {
    struct ggml_dflash_tag tag;
    memcpy(&tag, (const char *) node->op_params + GGML_DFLASH_TAG_AT, sizeof(tag));
    if (node->op != GGML_OP_CUSTOM || tag.magic != GGML_DFLASH_MAGIC) {
        memset(&tag, 0, sizeof(tag));
    }
    return tag;
}

// Makes a custom node one of ours; the magic is filled in.
static inline void ggml_dflash_set_tag(struct ggml_tensor * node, struct ggml_dflash_tag tag) {
    tag.magic = GGML_DFLASH_MAGIC;
    memcpy((char *) node->op_params + GGML_DFLASH_TAG_AT, &tag, sizeof(tag));
}

// Whether GGML_DFLASH_DRAFT_OPS in the environment is this: `0` leaves the base's top-k, convolution, head and selector as they
// are, `composite` builds the draft's graph from ordinary operations. For comparison; to be asked once and kept.
static inline bool ggml_dflash_draft_ops_is(const char * mode) {
    const char * value = getenv("GGML_DFLASH_DRAFT_OPS");
    return value != NULL && strcmp(value, mode) == 0;
}

// The CPU backend's functions, by ggml_backend_reg_get_proc_address(): "ggml_dflash_conv", "ggml_dflash_lattice". Null where
// the library is another build.
typedef ggml_custom_op_t ggml_dflash_function;

#ifdef __cplusplus
}
#endif
