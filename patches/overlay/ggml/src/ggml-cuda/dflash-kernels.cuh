// The device code of dflash.cu. Whoever includes it provides what CUDA and llama.cpp's common.cuh and convert.cuh do;
// the tests provide the same for the CPU (tests/native/cuda_emulation.h) and run this very code.
//
// Figures beside the kernels: hidden size 5120, 2 taps, groups of 16 channels, V 248320, one block of 8 tokens, 7 of
// them drafted, k 16, rank 256, 5 layers, codebooks in Q8_0. They are counted, not measured.
#pragma once

#include <cstdint>

// Shared memory, so that the tests can put each array on the heap with its exact size.
#ifndef DFLASH_SHARED
#define DFLASH_SHARED(type, name, count)  __shared__ type name[count]
#define DFLASH_SHARED_DYNAMIC(type, name) extern __shared__ type name[]
#endif

// One rounding each, never contracted to a fused multiply-add.
static __device__ __forceinline__ float dflash_mul(const float a, const float b) {
#if defined(__HIP__)
#pragma clang fp contract(off)
    return a * b;
#else
    return __fmul_rn(a, b);
#endif
}

static __device__ __forceinline__ float dflash_add(const float a, const float b) {
#if defined(__HIP__)
#pragma clang fp contract(off)
    return a + b;
#else
    return __fadd_rn(a, b);
#endif
}

// ---- convolution -------------------------------------------------------------------------------------------------
//
// A thread computes one channel of one token, so neighbours read neighbouring channels of everything but the dynamic
// coefficients, of which 16 threads share one. The taps' rows of x and the base come from L2 for all tokens but one.
//
// One launch reads x 164 KB, base 41 KB (F32), dynamic 20 KB, residual 164 KB and writes 164 KB: 553 KB, 0.3 us at
// 2 TB/s, less than a launch. 4 launches a layer, 20 a draft.

#define DFLASH_CONV_THREADS 256

struct dflash_conv_args {
    const float * x;
    const float * dynamic;   // of the side at hand
    const void  * base;      // of the side at hand
    const float * residual;  // or null
    float       * dst;
    int64_t x_stride;        // strides of rows, in elements
    int64_t dynamic_stride;
    int64_t residual_stride;
    int n_channels;
    int n_rows;              // T
    int n_tokens;            // of a block
    int n_taps;
    int group;
};

template <typename base_t>
static __global__ void __launch_bounds__(DFLASH_CONV_THREADS) dflash_conv(const dflash_conv_args a) {
    ggml_cuda_pdl_lc();
    const int c = blockIdx.x * DFLASH_CONV_THREADS + threadIdx.x;
    if (c >= a.n_channels) {
        return;
    }
    ggml_cuda_pdl_sync();

    const base_t * base     = (const base_t *) a.base;
    const int      n_groups = a.n_channels / a.group;
    const int      g        = c / a.group;

    for (int i = blockIdx.y; i < a.n_rows; i += gridDim.y) {
        const int at   = i % a.n_tokens;
        const int taps = at < a.n_taps ? at + 1 : a.n_taps;

        float sum = 0.0f;
        for (int t = 0; t < taps; ++t) {
            const float dynamic     = a.dynamic[i * a.dynamic_stride + (int64_t) t * n_groups + g];
            const float coefficient = dflash_add(ggml_cuda_cast<float>(base[(int64_t) t * a.n_channels + c]), dynamic);
            const float term        = dflash_mul(coefficient, a.x[(i - t) * a.x_stride + c]);
            sum = t == 0 ? term : dflash_add(sum, term);
        }
        a.dst[(int64_t) i * a.n_channels + c] =
            a.residual ? dflash_add(a.residual[i * a.residual_stride + c], sum) : sum;
    }
}

// ---- lattice -----------------------------------------------------------------------------------------------------
//
// A thread block computes one token's row of dst. It puts the codebook rows of the k predecessors (times the gate) and
// of the k candidates into shared memory, a tile of the rank at a time, and each thread sums k*k / 256 scores, four
// ranks per load. A row in shared memory is 4 floats longer than the tile, so that the eight lanes of a 16-byte load
// phase hit different banks. Scores of the tiles before lie in dst.
//
// One launch reads 7 * 32 codebook rows of 272 bytes (61 KB), 448 bytes of candidates, as many of logits, 7 KB of gate,
// and writes 8 rows of dst (164 KB): 0.2 MB, 0.1 us at 2 TB/s. The chain of candidate, row and product decides: two waits for memory (33 KB of
// shared memory hold all 256 ranks, so there is one tile, and a thread's 8 loads are under way together), then 64 times
// two loads of 16 bytes a thread, some 1500 shared memory cycles.

#define DFLASH_LATTICE_THREADS 256
#define DFLASH_LATTICE_MAX_K   64

// Rows of a codebook as they lie in memory. quad() is four values from r on, r a multiple of 4, and 0 from `end` on;
// types in blocks have whole blocks of 32.

template <typename value_t>
struct dflash_row_float {
    static __device__ __forceinline__ float4 quad(const char * row, const int r, const int end) {
        const value_t * x = (const value_t *) row + r;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        v.x = ggml_cuda_cast<float>(x[0]);
        if (r + 1 < end) {
            v.y = ggml_cuda_cast<float>(x[1]);
        }
        if (r + 2 < end) {
            v.z = ggml_cuda_cast<float>(x[2]);
        }
        if (r + 3 < end) {
            v.w = ggml_cuda_cast<float>(x[3]);
        }
        return v;
    }
};

// Blocks are multiples of two bytes, so their bytes are read in pairs (all devices are little-endian).

struct dflash_row_q8_0 {
    half     d;
    uint16_t q[16];

    static __device__ __forceinline__ float4 quad(const char * row, const int r, int) {
        const dflash_row_q8_0 & b = ((const dflash_row_q8_0 *) row)[r / 32];
        const float    d    = ggml_cuda_cast<float>(b.d);
        const uint16_t low  = b.q[r % 32 / 2];
        const uint16_t high = b.q[r % 32 / 2 + 1];
        return make_float4((int8_t) low * d, (int8_t) (low >> 8) * d, (int8_t) high * d, (int8_t) (high >> 8) * d);
    }
};

// Values i to i + 3 of a block of 32 in four bits, one a byte. The first 16 values are the low halves.
static __device__ __forceinline__ uint32_t dflash_nibbles(const uint16_t * q, const int i) {
    const uint32_t bytes = q[i % 16 / 2] | (uint32_t) q[i % 16 / 2 + 1] << 16;
    return (i < 16 ? bytes : bytes >> 4) & 0x0f0f0f0fu;
}

// The same with the fifth bits, which lie in order.
static __device__ __forceinline__ uint32_t dflash_fives(const uint16_t * q, const uint16_t * fifth, const int i) {
    const uint32_t bits = fifth[i / 16] >> i % 16;
    return dflash_nibbles(q, i) | (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25;
}

// (byte - less) * d + m
static __device__ __forceinline__ float4 dflash_scale(const uint32_t bytes, const int less, const float d, const float m) {
    return make_float4(((int) (bytes & 255) - less) * d + m, ((int) (bytes >> 8 & 255) - less) * d + m,
                       ((int) (bytes >> 16 & 255) - less) * d + m, ((int) (bytes >> 24) - less) * d + m);
}

struct dflash_row_q4_0 {
    half     d;
    uint16_t q[8];

    static __device__ __forceinline__ float4 quad(const char * row, const int r, int) {
        const dflash_row_q4_0 & b = ((const dflash_row_q4_0 *) row)[r / 32];
        return dflash_scale(dflash_nibbles(b.q, r % 32), 8, ggml_cuda_cast<float>(b.d), 0.0f);
    }
};

struct dflash_row_q4_1 {
    half     d, m;
    uint16_t q[8];

    static __device__ __forceinline__ float4 quad(const char * row, const int r, int) {
        const dflash_row_q4_1 & b = ((const dflash_row_q4_1 *) row)[r / 32];
        return dflash_scale(dflash_nibbles(b.q, r % 32), 0, ggml_cuda_cast<float>(b.d), ggml_cuda_cast<float>(b.m));
    }
};

struct dflash_row_q5_0 {
    half     d;
    uint16_t fifth[2];
    uint16_t q[8];

    static __device__ __forceinline__ float4 quad(const char * row, const int r, int) {
        const dflash_row_q5_0 & b = ((const dflash_row_q5_0 *) row)[r / 32];
        return dflash_scale(dflash_fives(b.q, b.fifth, r % 32), 16, ggml_cuda_cast<float>(b.d), 0.0f);
    }
};

struct dflash_row_q5_1 {
    half     d, m;
    uint16_t fifth[2];
    uint16_t q[8];

    static __device__ __forceinline__ float4 quad(const char * row, const int r, int) {
        const dflash_row_q5_1 & b = ((const dflash_row_q5_1 *) row)[r / 32];
        return dflash_scale(dflash_fives(b.q, b.fifth, r % 32), 0, ggml_cuda_cast<float>(b.d), ggml_cuda_cast<float>(b.m));
    }
};

enum dflash_row_type {
    DFLASH_ROW_F32,
    DFLASH_ROW_F16,
    DFLASH_ROW_BF16,
    DFLASH_ROW_Q8_0,
    DFLASH_ROW_Q4_0,
    DFLASH_ROW_Q4_1,
    DFLASH_ROW_Q5_0,
    DFLASH_ROW_Q5_1,
    DFLASH_ROW_NONE,
};

struct dflash_codebook {
    const char * data;
    int64_t      stride;  // bytes from row to row
    int          n_rows;
    int          type;    // dflash_row_type
};

struct dflash_lattice_args {
    const float   * logits;
    const int32_t * candidates;
    const float   * gate;
    const int32_t * tokens;
    const int64_t * names;  // tokens of the logits, null if these are all tokens
    float         * dst;
    dflash_codebook predecessors;
    dflash_codebook successors;
    int64_t logits_stride;  // strides of rows, in elements
    int64_t candidates_stride;
    int64_t gate_stride;
    int n_vocab;
    int width;              // of dst
    int n_tokens;           // of a block
    int n_drafted;
    int k;
    int rank;
    int tile;               // ranks in shared memory at a time, a multiple of 4
};

// Floats of dynamic shared memory for rows of `tile` ranks.
static constexpr int dflash_lattice_shared(const int k, const int tile) {
    return 2 * k * (tile + 4);
}

// The widest tile that leaves room for others in 48 KB, which every device gives without being asked.
static inline int dflash_lattice_tile(const int k, const int rank) {
    int tile = (rank + 31) / 32 * 32;
    while (tile > 32 && dflash_lattice_shared(k, tile) > 10 * 1024) {
        tile -= 32;
    }
    return tile;
}

#define DFLASH_LATTICE_BATCH 8  // loads of a thread in flight, so that their latencies pass together

// Ranks [first, first + n) of rows [from, to) in shared memory: row i < k is predecessor ids[i] times the gate, the k after
// are candidates. An id outside its table gives zeros.
template <typename row_t>
static __device__ __forceinline__ void dflash_load_rows(const dflash_lattice_args & a, const int * ids, const float * gate,
                                                        const int from, const int to, const int first, const int n,
                                                        float4 * rows) {
    const int thread = threadIdx.x;
    const int quads  = (n + 3) / 4;
    const int stride = a.tile / 4 + 1;
    const int count  = (to - from) * quads;
    for (int begin = 0; begin < count; begin += DFLASH_LATTICE_BATCH * DFLASH_LATTICE_THREADS) {
        float4 values[DFLASH_LATTICE_BATCH];
#pragma unroll
        for (int e = 0; e < DFLASH_LATTICE_BATCH; ++e) {
            const int at = begin + e * DFLASH_LATTICE_THREADS + thread;
            values[e] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at < count) {
                const int i  = from + at / quads;
                const int id = ids[i];
                const dflash_codebook & table = i < a.k ? a.predecessors : a.successors;
                if ((uint32_t) id < (uint32_t) table.n_rows) {
                    values[e] = row_t::quad(table.data + id * table.stride, first + at % quads * 4, first + n);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < DFLASH_LATTICE_BATCH; ++e) {
            const int at = begin + e * DFLASH_LATTICE_THREADS + thread;
            if (at < count) {
                const int i = from + at / quads;
                const int q = at % quads;
                float4    v = values[e];
                if (i < a.k) {
                    v.x *= gate[4 * q];
                    v.y *= 4 * q + 1 < n ? gate[4 * q + 1] : 0.0f;
                    v.z *= 4 * q + 2 < n ? gate[4 * q + 2] : 0.0f;
                    v.w *= 4 * q + 3 < n ? gate[4 * q + 3] : 0.0f;
                }
                rows[i * stride + q] = v;
            }
        }
    }
}

static __device__ __forceinline__ void dflash_load_rows_of(const int type, const dflash_lattice_args & a, const int * ids,
                                                           const float * gate, const int from, const int to,
                                                           const int first, const int n, float4 * rows) {
    switch (type) {
        case DFLASH_ROW_F32:  return dflash_load_rows<dflash_row_float<float>>(a, ids, gate, from, to, first, n, rows);
        case DFLASH_ROW_F16:  return dflash_load_rows<dflash_row_float<half>>(a, ids, gate, from, to, first, n, rows);
        case DFLASH_ROW_BF16: return dflash_load_rows<dflash_row_float<nv_bfloat16>>(a, ids, gate, from, to, first, n, rows);
        case DFLASH_ROW_Q8_0: return dflash_load_rows<dflash_row_q8_0>(a, ids, gate, from, to, first, n, rows);
        case DFLASH_ROW_Q4_0: return dflash_load_rows<dflash_row_q4_0>(a, ids, gate, from, to, first, n, rows);
        case DFLASH_ROW_Q4_1: return dflash_load_rows<dflash_row_q4_1>(a, ids, gate, from, to, first, n, rows);
        case DFLASH_ROW_Q5_0: return dflash_load_rows<dflash_row_q5_0>(a, ids, gate, from, to, first, n, rows);
        case DFLASH_ROW_Q5_1: return dflash_load_rows<dflash_row_q5_1>(a, ids, gate, from, to, first, n, rows);
    }
}

static __device__ __forceinline__ int dflash_token(const dflash_lattice_args & a, const int id) {
    return a.names != nullptr && (uint32_t) id < (uint32_t) a.n_vocab ? (int) a.names[id] : id;
}

static __global__ void __launch_bounds__(DFLASH_LATTICE_THREADS) dflash_lattice(const dflash_lattice_args a) {
    DFLASH_SHARED_DYNAMIC(float4, rows);  // k predecessors, then k candidates
    DFLASH_SHARED(int, ids, 2 * DFLASH_LATTICE_MAX_K);
    DFLASH_SHARED(float, unary, DFLASH_LATTICE_MAX_K);

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    const int k = a.k;
    const int p = blockIdx.x % a.n_tokens;
    float * out = a.dst + (int64_t) blockIdx.x * a.width;

    const int used = p >= 1 && p <= a.n_drafted ? k + k * k : 0;
    for (int i = used + threadIdx.x; i < a.width; i += DFLASH_LATTICE_THREADS) {
        out[i] = 0.0f;
    }
    if (used == 0) {
        return;  // the whole thread block
    }

    const int64_t r = (int64_t) (blockIdx.x / a.n_tokens) * a.n_drafted + p - 1;
    for (int i = threadIdx.x; i < k; i += DFLASH_LATTICE_THREADS) {
        const int id = a.candidates[r * a.candidates_stride + i];
        const int named = dflash_token(a, id);
        ids[i]     = p == 1 ? a.tokens[blockIdx.x - 1] : dflash_token(a, a.candidates[(r - 1) * a.candidates_stride + i]);
        ids[k + i] = named;
        unary[i]   = (uint32_t) id < (uint32_t) a.n_vocab ? a.logits[r * a.logits_stride + id] : 0.0f;
        out[i]     = (float) named;
    }
    __syncthreads();

    const int     stride = a.tile / 4 + 1;
    const float * gate   = a.gate + r * a.gate_stride;
    for (int first = 0; first < a.rank; first += a.tile) {
        const int  n    = a.rank - first < a.tile ? a.rank - first : a.tile;
        const bool last = first + n == a.rank;
        if (first > 0) {
            __syncthreads();  // the tile before has been read
        }
        const bool alike = a.predecessors.type == a.successors.type;
        dflash_load_rows_of(a.predecessors.type, a, ids, gate + first, 0, alike ? 2 * k : k, first, n, rows);
        if (!alike) {
            dflash_load_rows_of(a.successors.type, a, ids, gate, k, 2 * k, first, n, rows);
        }
        __syncthreads();

        for (int o = threadIdx.x; o < k * k; o += DFLASH_LATTICE_THREADS) {
            const int j = o / k;
            const int c = o % k;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int q = 0; q < (n + 3) / 4; ++q) {
                const float4 x = rows[j * stride + q];
                const float4 y = rows[(k + c) * stride + q];
                sum.x = fmaf(x.x, y.x, sum.x);
                sum.y = fmaf(x.y, y.y, sum.y);
                sum.z = fmaf(x.z, y.z, sum.z);
                sum.w = fmaf(x.w, y.w, sum.w);
            }
            float score = (sum.x + sum.y) + (sum.z + sum.w);
            if (first > 0) {
                score += out[k + o];
            }
            out[k + o] = last ? unary[c] + score : score;
        }
    }
}

// ---- top-k -------------------------------------------------------------------------------------------------------
//
// The k largest of a row, descending. A value and its id make one 64-bit key, larger for the larger value and for the
// lower of equal values' ids; no two keys of a row are the same, so one order decides everything, and rows of nothing
// but -infinity need no special case. NaN counts as -infinity, -0 as +0.
//
// A thread block takes a part of a row in tiles of 2048 values and keeps the k best in shared memory. Per tile, each
// of 8 warps sorts its lanes' largest keys; half of the warps have k/4 lanes each at or above the middle one of
// their (k/4)-th largest, which is a bound below which nothing is among the k best. What reaches it (about 60 keys of
// random values) is ranked by counting. A second kernel does the same with the parts' keys.
//
// Two launches read 7 rows of 993 KB (7.0 MB, 3.5 us at 2 TB/s) and write and read 7 * 122 * 16 keys (0.1 MB).

#define DFLASH_TOP_K_THREADS 256
#define DFLASH_TOP_K_ITEMS   8     // keys a thread holds
#define DFLASH_TOP_K_TILE    (DFLASH_TOP_K_THREADS * DFLASH_TOP_K_ITEMS)
#define DFLASH_TOP_K_WARPS   (DFLASH_TOP_K_THREADS / 32)
#define DFLASH_TOP_K_MAX_K   64
#define DFLASH_TOP_K_MERGED  4096  // keys that the second kernel gets at most, where rows are not too long for that

typedef unsigned long long dflash_key;  // 0: none

static __device__ __forceinline__ dflash_key dflash_make_key(const float value, const int id) {
    uint32_t       bits      = __float_as_uint(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        bits = 0xff800000u;
    } else if (magnitude == 0) {
        bits = 0;
    }
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (dflash_key) ordered << 32 | (0xffffffffu - (uint32_t) id);
}

static __device__ __forceinline__ int dflash_key_id(const dflash_key key) {
    return (int) (0xffffffffu - (uint32_t) key);
}

// 32 lanes' keys, largest first (Batcher's bitonic network).
static __device__ __forceinline__ dflash_key dflash_sort_lanes(dflash_key key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2) {
            const dflash_key other = __shfl_xor_sync(0xffffffff, key, step, 32);
            const bool larger = ((lane & step) == 0) == ((lane & size) == 0);
            key = (key > other) == larger ? key : other;
        }
    }
    return key;
}

// Adds a tile to the k best so far. best [k], found [tile + k], bound [warps], n_found [1] are shared memory. best is
// descending; it is complete after the first barrier here, and at the end.
static __device__ __forceinline__ void dflash_select(const dflash_key (&keys)[DFLASH_TOP_K_ITEMS], const int k,
                                                     dflash_key * best, dflash_key * found, dflash_key * bound,
                                                     int * n_found) {
    const int  thread  = threadIdx.x;
    dflash_key largest = keys[0];
#pragma unroll
    for (int i = 1; i < DFLASH_TOP_K_ITEMS; ++i) {
        largest = keys[i] > largest ? keys[i] : largest;
    }
    largest = dflash_sort_lanes(largest);
    if (thread % 32 == (k + 3) / 4 - 1) {
        bound[thread / 32] = largest;
    }
    if (thread == 0) {
        *n_found = 0;
    }
    __syncthreads();

    // The fourth largest of the bounds: four warps have k/4 keys at or above theirs.
    dflash_key least = ~0ull;
#pragma unroll
    for (int i = 0; i < DFLASH_TOP_K_WARPS; ++i) {
        int above = 0;
#pragma unroll
        for (int j = 0; j < DFLASH_TOP_K_WARPS; ++j) {
            above += bound[j] > bound[i];
        }
        least = above < 4 && bound[i] < least ? bound[i] : least;
    }
    const dflash_key floor = best[k - 1];
#pragma unroll
    for (int i = 0; i < DFLASH_TOP_K_ITEMS; ++i) {
        if (keys[i] >= least && keys[i] > floor) {
            found[atomicAdd(n_found, 1)] = keys[i];
        }
    }
    if (thread < k && best[thread] != 0) {
        found[atomicAdd(n_found, 1)] = best[thread];
    }
    __syncthreads();

    const int n = *n_found;
    for (int i = thread; i < n; i += DFLASH_TOP_K_THREADS) {
        const dflash_key key = found[i];
        int rank = 0;
        for (int j = 0; j < n && rank < k; ++j) {
            rank += found[j] > key;
        }
        if (rank < k) {
            best[rank] = key;
        }
    }
    for (int i = n + thread; i < k; i += DFLASH_TOP_K_THREADS) {
        best[i] = 0;
    }
    __syncthreads();
}

static __device__ __forceinline__ dflash_key dflash_key_at(const float * row, const int at) {
    return dflash_make_key(row[at], at);
}

static __device__ __forceinline__ dflash_key dflash_key_at(const dflash_key * row, const int at) {
    return row[at];
}

// Part blockIdx.x % n_parts of row blockIdx.x / n_parts, of values or of keys. With one part the ids are the result,
// else the keys are parts', which a second launch goes through as rows of one part.
template <typename source_t>
static __global__ void __launch_bounds__(DFLASH_TOP_K_THREADS) dflash_top_k(const source_t * __restrict__ src,
                                                                            dflash_key * __restrict__ parts,
                                                                            int32_t * __restrict__ dst,
                                                                            const int n_columns, const int n_parts,
                                                                            const int length, const int k) {
    DFLASH_SHARED(dflash_key, best, DFLASH_TOP_K_MAX_K);
    DFLASH_SHARED(dflash_key, found, DFLASH_TOP_K_TILE + DFLASH_TOP_K_MAX_K);
    DFLASH_SHARED(dflash_key, bound, DFLASH_TOP_K_WARPS);
    DFLASH_SHARED(int, n_found, 1);

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    const int thread = threadIdx.x;
    if (thread < k) {
        best[thread] = 0;
    }

    const source_t * row = src + (int64_t) (blockIdx.x / n_parts) * n_columns;
    const int begin = blockIdx.x % n_parts * length;
    const int end   = n_columns - begin < length ? n_columns : begin + length;
    for (int tile = begin; tile < end; tile += DFLASH_TOP_K_TILE) {
        dflash_key keys[DFLASH_TOP_K_ITEMS];
#pragma unroll
        for (int i = 0; i < DFLASH_TOP_K_ITEMS; ++i) {
            const int left = end - tile;
            const int at   = i * DFLASH_TOP_K_THREADS + thread;
            keys[i] = at < left ? dflash_key_at(row, tile + at) : 0;
        }
        dflash_select(keys, k, best, found, bound, n_found);
    }
    if (thread < k) {
        const int64_t at = (int64_t) blockIdx.x * k + thread;
        if (n_parts == 1) {
            dst[at] = dflash_key_id(best[thread]);
        } else {
            parts[at] = best[thread];
        }
    }
}

// How a row is divided: whole tiles, few enough keys for the second kernel.
struct dflash_top_k_parts {
    int n_parts;
    int length;
};

static inline dflash_top_k_parts dflash_divide_row(const int n_columns, const int k) {
    const int64_t n_tiles  = ((int64_t) n_columns + DFLASH_TOP_K_TILE - 1) / DFLASH_TOP_K_TILE;
    const int64_t per_part = (n_tiles * k + DFLASH_TOP_K_MERGED - 1) / DFLASH_TOP_K_MERGED;
    return { (int) ((n_tiles + per_part - 1) / per_part), (int) (per_part * DFLASH_TOP_K_TILE) };
}
