// Launches of the kernels in dflash-kernels.cuh. Nothing here waits for the device or reads from it, and a node's launch
// depends on its shapes and tag alone, so all of it can be part of a CUDA graph.

#include "dflash.cuh"

#include "convert.cuh"
#include "dflash-kernels.cuh"
#include "ggml-dflash.h"

#include <algorithm>
#include <climits>

static_assert(DFLASH_LATTICE_MAX_K == GGML_DFLASH_MAX_TOP_K, "the lattice kernel's k");
static_assert(sizeof(dflash_row_q8_0) == sizeof(block_q8_0), "layout of Q8_0");
static_assert(sizeof(dflash_row_q4_0) == sizeof(block_q4_0), "layout of Q4_0");
static_assert(sizeof(dflash_row_q4_1) == sizeof(block_q4_1), "layout of Q4_1");
static_assert(sizeof(dflash_row_q5_0) == sizeof(block_q5_0), "layout of Q5_0");
static_assert(sizeof(dflash_row_q5_1) == sizeof(block_q5_1), "layout of Q5_1");

// Up to here the base's single bitonic sort is one launch as well.
static constexpr int64_t DFLASH_TOP_K_MIN_COLUMNS = 1024;

static dflash_row_type dflash_row_type_of(const ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:  return DFLASH_ROW_F32;
        case GGML_TYPE_F16:  return DFLASH_ROW_F16;
        case GGML_TYPE_BF16: return DFLASH_ROW_BF16;
        case GGML_TYPE_Q8_0: return DFLASH_ROW_Q8_0;
        case GGML_TYPE_Q4_0: return DFLASH_ROW_Q4_0;
        case GGML_TYPE_Q4_1: return DFLASH_ROW_Q4_1;
        case GGML_TYPE_Q5_0: return DFLASH_ROW_Q5_0;
        case GGML_TYPE_Q5_1: return DFLASH_ROW_Q5_1;
        default:             return DFLASH_ROW_NONE;
    }
}

// A matrix of 4-byte values whose rows may be strided.
static bool dflash_is_matrix(const ggml_tensor * t, const ggml_type type, const int64_t ne0, const int64_t ne1) {
    return t != nullptr && t->type == type && t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == 1 && t->ne[3] == 1 &&
           t->nb[0] == sizeof(float) && t->nb[1] % sizeof(float) == 0;
}

static bool dflash_conv_supported(const ggml_tensor * op, const ggml_dflash_tag & tag) {
    const ggml_tensor * base = op->src[2];
    const int64_t H = op->ne[0];
    const int64_t T = op->ne[1];
    if (tag.n_tokens < 1 || tag.n_taps < 1 || tag.group < 1 || tag.side < 0 || tag.side > 1 || H % tag.group != 0 ||
        T % tag.n_tokens != 0 || H > INT_MAX - DFLASH_CONV_THREADS || T > INT_MAX / 2) {
        return false;
    }
    return dflash_is_matrix(op, GGML_TYPE_F32, H, T) && ggml_is_contiguous(op) &&
           dflash_is_matrix(op->src[0], GGML_TYPE_F32, H, T) &&
           dflash_is_matrix(op->src[1], GGML_TYPE_F32, 2 * tag.n_taps * (H / tag.group), T) &&
           (op->src[3] == nullptr || dflash_is_matrix(op->src[3], GGML_TYPE_F32, H, T)) && base != nullptr &&
           (base->type == GGML_TYPE_F32 || base->type == GGML_TYPE_F16 || base->type == GGML_TYPE_BF16) &&
           ggml_is_contiguous(base) && base->ne[0] == H && base->ne[1] == tag.n_taps && base->ne[2] == 2 && base->ne[3] == 1;
}

static bool dflash_is_names(const ggml_tensor * t, const int64_t n_vocab) {
    return t == nullptr || (t->type == GGML_TYPE_I64 && t->ne[0] == n_vocab && ggml_nelements(t) == n_vocab && ggml_is_contiguous(t));
}

static bool dflash_is_codebook(const ggml_tensor * t, const int64_t rank, const int64_t n_vocab) {
    return t != nullptr && dflash_row_type_of(t->type) != DFLASH_ROW_NONE && t->ne[0] == rank && t->ne[1] >= n_vocab &&
           t->ne[1] <= INT_MAX && t->ne[2] == 1 && t->ne[3] == 1 && t->nb[0] == ggml_type_size(t->type);
}

static bool dflash_lattice_supported(const ggml_tensor * op, const ggml_dflash_tag & tag) {
    const ggml_tensor * logits     = op->src[0];
    const ggml_tensor * candidates = op->src[1];
    const ggml_tensor * gate       = op->src[2];
    const ggml_tensor * tokens     = op->src[5];
    const int64_t T = op->ne[1];
    if (logits == nullptr || candidates == nullptr || gate == nullptr || tokens == nullptr || tag.n_drafted < 1 ||
        tag.n_drafted >= tag.n_tokens || T % tag.n_tokens != 0) {
        return false;
    }
    const int64_t R    = T / tag.n_tokens * tag.n_drafted;
    const int64_t V    = logits->ne[0];
    const int64_t k    = candidates->ne[0];
    const int64_t rank = gate->ne[0];
    if (k < 1 || k > GGML_DFLASH_MAX_TOP_K || rank < 1 || rank > INT_MAX / 2 || V > INT_MAX || T > INT_MAX / 2 ||
        op->ne[0] < k + k * k || op->ne[0] > INT_MAX / 2) {
        return false;
    }
    return dflash_is_matrix(op, GGML_TYPE_F32, op->ne[0], T) && ggml_is_contiguous(op) &&
           dflash_is_matrix(logits, GGML_TYPE_F32, V, R) && dflash_is_matrix(candidates, GGML_TYPE_I32, k, R) &&
           dflash_is_matrix(gate, GGML_TYPE_F32, rank, R) && dflash_is_codebook(op->src[3], rank, V) &&
           dflash_is_codebook(op->src[4], rank, V) && dflash_is_matrix(tokens, GGML_TYPE_I32, T, 1) && dflash_is_names(op->src[6], V);
}

bool ggml_cuda_dflash_supported(const ggml_tensor * op) {
    const ggml_dflash_tag tag = ggml_dflash_get_tag(op);
    switch (tag.kind) {
        case GGML_DFLASH_CONV:    return dflash_conv_supported(op, tag);
        case GGML_DFLASH_LATTICE: return dflash_lattice_supported(op, tag);
        default:                  return false;
    }
}

static void dflash_conv_node(const ggml_tensor * dst, const ggml_dflash_tag & tag, cudaStream_t stream) {
    const ggml_tensor * x        = dst->src[0];
    const ggml_tensor * dynamic  = dst->src[1];
    const ggml_tensor * base     = dst->src[2];
    const ggml_tensor * residual = dst->src[3];
    const int64_t       H        = dst->ne[0];

    dflash_conv_args args;
    args.x               = (const float *) x->data;
    args.dynamic         = (const float *) dynamic->data + tag.side * tag.n_taps * (H / tag.group);
    args.base            = (const char *) base->data + tag.side * base->nb[2];
    args.residual        = residual ? (const float *) residual->data : nullptr;
    args.dst             = (float *) dst->data;
    args.x_stride        = x->nb[1] / sizeof(float);
    args.dynamic_stride  = dynamic->nb[1] / sizeof(float);
    args.residual_stride = residual ? residual->nb[1] / sizeof(float) : 0;
    args.n_channels      = (int) H;
    args.n_rows          = (int) dst->ne[1];
    args.n_tokens        = tag.n_tokens;
    args.n_taps          = tag.n_taps;
    args.group           = tag.group;

    const dim3 grid((unsigned) ((H + DFLASH_CONV_THREADS - 1) / DFLASH_CONV_THREADS),
                    (unsigned) std::min<int64_t>(dst->ne[1], 65535), 1);
    const ggml_cuda_kernel_launch_params launch(grid, dim3(DFLASH_CONV_THREADS, 1, 1), (size_t) 0, stream);
    switch (base->type) {
        case GGML_TYPE_F32: ggml_cuda_kernel_launch(dflash_conv<float>, launch, args); break;
        case GGML_TYPE_F16: ggml_cuda_kernel_launch(dflash_conv<half>, launch, args); break;
        default:            ggml_cuda_kernel_launch(dflash_conv<nv_bfloat16>, launch, args); break;
    }
}

static dflash_codebook dflash_codebook_of(const ggml_tensor * t) {
    return { (const char *) t->data, (int64_t) t->nb[1], (int) t->ne[1], dflash_row_type_of(t->type) };
}

static void dflash_lattice_node(const ggml_tensor * dst, const ggml_dflash_tag & tag, cudaStream_t stream) {
    const ggml_tensor * logits     = dst->src[0];
    const ggml_tensor * candidates = dst->src[1];
    const ggml_tensor * gate       = dst->src[2];

    dflash_lattice_args args;
    args.logits            = (const float *) logits->data;
    args.candidates        = (const int32_t *) candidates->data;
    args.gate              = (const float *) gate->data;
    args.tokens            = (const int32_t *) dst->src[5]->data;
    args.names             = dst->src[6] ? (const int64_t *) dst->src[6]->data : nullptr;
    args.dst               = (float *) dst->data;
    args.predecessors      = dflash_codebook_of(dst->src[3]);
    args.successors        = dflash_codebook_of(dst->src[4]);
    args.logits_stride     = logits->nb[1] / sizeof(float);
    args.candidates_stride = candidates->nb[1] / sizeof(int32_t);
    args.gate_stride       = gate->nb[1] / sizeof(float);
    args.n_vocab           = (int) logits->ne[0];
    args.width             = (int) dst->ne[0];
    args.n_tokens          = tag.n_tokens;
    args.n_drafted         = tag.n_drafted;
    args.k                 = (int) candidates->ne[0];
    args.rank              = (int) gate->ne[0];
    args.tile              = dflash_lattice_tile(args.k, args.rank);

    const ggml_cuda_kernel_launch_params launch(dim3((unsigned) dst->ne[1], 1, 1), dim3(DFLASH_LATTICE_THREADS, 1, 1),
                                                dflash_lattice_shared(args.k, args.tile) * sizeof(float), stream);
    ggml_cuda_kernel_launch(dflash_lattice, launch, args);
}

void ggml_cuda_dflash(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_dflash_tag tag = ggml_dflash_get_tag(dst);
    if (ggml_nelements(dst) == 0) {
        return;
    }
    switch (tag.kind) {
        case GGML_DFLASH_CONV:    dflash_conv_node(dst, tag, ctx.stream()); break;
        case GGML_DFLASH_LATTICE: dflash_lattice_node(dst, tag, ctx.stream()); break;
        default:                  GGML_ABORT("not a node of ggml-dflash.h");
    }
}

bool ggml_cuda_dflash_top_k(ggml_backend_cuda_context & ctx, const float * src, int32_t * dst, const int64_t n_columns,
                            const int64_t n_rows, const int64_t k) {
    static const bool enabled = !ggml_dflash_draft_ops_is("0");
    if (!enabled || k < 1 || k > DFLASH_TOP_K_MAX_K || n_columns <= DFLASH_TOP_K_MIN_COLUMNS ||
        n_columns > INT_MAX - DFLASH_TOP_K_TILE || n_rows < 1) {
        return false;
    }
    const dflash_top_k_parts divided = dflash_divide_row((int) n_columns, (int) k);
    const int64_t            n_parts = divided.n_parts;
    if (n_rows > INT_MAX / n_parts) {
        return false;
    }

    const cudaStream_t stream = ctx.stream();
    const dim3         threads(DFLASH_TOP_K_THREADS, 1, 1);
    ggml_cuda_pool_alloc<dflash_key> parts(ctx.pool());
    if (n_parts > 1) {
        parts.alloc(n_rows * n_parts * k);
    }
    const ggml_cuda_kernel_launch_params launch(dim3((unsigned) (n_rows * n_parts), 1, 1), threads, (size_t) 0, stream);
    ggml_cuda_kernel_launch(dflash_top_k<float>, launch, src, parts.ptr, dst, (int) n_columns, divided.n_parts,
                            divided.length, (int) k);
    if (n_parts > 1) {
        const ggml_cuda_kernel_launch_params merge(dim3((unsigned) n_rows, 1, 1), threads, (size_t) 0, stream);
        const int n_keys = (int) (n_parts * k);
        ggml_cuda_kernel_launch(dflash_top_k<dflash_key>, merge, (const dflash_key *) parts.ptr, (dflash_key *) nullptr, dst,
                                n_keys, 1, n_keys, (int) k);
    }
    return true;
}
