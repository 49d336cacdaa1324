// Kernels for matrix products of few columns.
//
// Quantised weights: a tile is LANES rows of weights and up to MAX_TILE columns. The lanes of a
// vector are rows, so a block of 32 values is transposed on the fly into eight vectors of four bytes
// per row; each is multiplied with the same four bytes of every column. The integer sum of a block is
// exact; then acc = fma(sum, d_w * d_x, acc), block after block. Float weights: the lanes are 16
// (or 8) consecutive k, one accumulator per row and column, summed across lanes at the end.
// In both the order of a result's operations does not depend on the tile it is computed in.
//
// Per 16 rows x 32 k and column the AVX-512 kernel issues 8 dot products and 4 other operations for
// 512 multiply-adds, and about 50 operations to unpack, once for all columns; see docs/kernels.md.

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // both raised inside the compiler's own intrinsics
#endif

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "mul-mat.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "quants.h"
#include "repack.h"
#include "simd-mappings.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define DFLASH_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DFLASH_LANES 8
#endif

#ifdef DFLASH_LANES

#include <immintrin.h>

namespace {

constexpr int     LANES    = DFLASH_LANES;
constexpr int     MAX_TILE = LANES == 16 ? 12 : 4;  // columns of a quantised tile: what the registers hold
constexpr int64_t QK       = 32;                    // values of a block

// ---- vectors ------------------------------------------------------------------------------------

#if DFLASH_LANES == 16

using fvec = __m512;
using ivec = __m512i;

// The dot product wants one unsigned side: weights are shifted by WEIGHT_SHIFT, and every block's sum
// starts from -WEIGHT_SHIFT * (sum of the column's four values in that lane's place) instead of zero.
constexpr bool UNSIGNED_WEIGHTS = true;

inline fvec fzero() { return _mm512_setzero_ps(); }
inline fvec fset(float x) { return _mm512_set1_ps(x); }
inline fvec fmul(fvec a, fvec b) { return _mm512_mul_ps(a, b); }
inline fvec fma(fvec a, fvec b, fvec c) { return _mm512_fmadd_ps(a, b, c); }
inline float fsum(fvec a) { return _mm512_reduce_add_ps(a); }
inline fvec to_float(ivec a) { return _mm512_cvtepi32_ps(a); }
inline ivec iset(int32_t x) { return _mm512_set1_epi32(x); }
inline ivec dot(ivec acc, ivec w, ivec x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline ivec pair(const int8_t * x) { int64_t v; memcpy(&v, x, 8); return _mm512_set1_epi64(v); }
inline ivec start_pair(int32_t x) { return _mm512_set1_epi64((uint32_t) x); }  // the first lane of each pair

// all lanes but the first `skip`
inline void store(float * y, fvec v, int skip) {
    _mm512_mask_storeu_ps(y, (__mmask16) (0xffffu << skip), v);
}

inline fvec load(const float * x) { return _mm512_loadu_ps(x); }
inline fvec load(const ggml_fp16_t * x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x)); }
inline fvec load(const ggml_bf16_t * x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) x)), 16));
}

#else

using fvec = __m256;
using ivec = __m256i;

constexpr bool UNSIGNED_WEIGHTS = false;

inline fvec fzero() { return _mm256_setzero_ps(); }
inline fvec fset(float x) { return _mm256_set1_ps(x); }
inline fvec fmul(fvec a, fvec b) { return _mm256_mul_ps(a, b); }
inline fvec fma(fvec a, fvec b, fvec c) { return _mm256_fmadd_ps(a, b, c); }
inline fvec to_float(ivec a) { return _mm256_cvtepi32_ps(a); }
inline ivec iset(int32_t x) { return _mm256_set1_epi32(x); }
inline ivec pair(const int8_t * x) { int64_t v; memcpy(&v, x, 8); return _mm256_set1_epi64x(v); }
inline ivec start_pair(int32_t) { return _mm256_setzero_si256(); }

inline float fsum(fvec a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline ivec dot(ivec acc, ivec w, ivec x) {
    // |w| <= 128 and |x| <= 127: two products fit 16 bits
    const ivec a = _mm256_abs_epi8(w), b = _mm256_sign_epi8(x, w);
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(acc, a, b);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
}

// all lanes but the first `skip`
inline void store(float * y, fvec v, int skip) {
    alignas(32) float all[8];
    _mm256_store_ps(all, v);
    memcpy(y + skip, all + skip, sizeof(float) * (8 - skip));
}

inline fvec load(const float * x) { return _mm256_loadu_ps(x); }
inline fvec load(const ggml_fp16_t * x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x)); }
inline fvec load(const ggml_bf16_t * x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) x)), 16));
}

#endif

inline ivec quad(const int8_t * x) { int32_t v; memcpy(&v, x, 4); return iset(v); }

// ---- activations --------------------------------------------------------------------------------

// The quantised columns, block after block: for each block the 32 bytes of every column, the scales of
// all columns, and the start values of their integer sums. A tile's addresses differ by constants.
struct Columns {
    char *  data;
    int64_t n;         // columns
    int64_t n_blocks;  // blocks per column

    static size_t bytes(int64_t k, int64_t n) { return (size_t) (k / QK) * n * (QK + 8); }

    size_t    stride() const { return n * (QK + 8); }  // bytes from block to block
    int8_t *  q(int64_t b, int64_t c) const { return (int8_t *) data + b * stride() + c * QK; }
    float *   d(int64_t b, int64_t c) const { return (float *) (data + b * stride() + n * QK) + c; }
    int32_t * start(int64_t b, int64_t c) const { return (int32_t *) d(b, n) + c; }
};

// Quantises blocks [first, last) of column c as the base does; `shift` is what weights are shifted by.
void quantize(const float * x, const Columns & out, int64_t c, int64_t first, int64_t last, int shift) {
    constexpr int64_t CHUNK = 16;
    block_q8_0        blocks[CHUNK];
    for (int64_t b0 = first; b0 < last; b0 += CHUNK) {
        const int64_t n = std::min(CHUNK, last - b0);
        quantize_row_q8_0(x + b0 * QK, blocks, n * QK);
        for (int64_t i = 0; i < n; i++) {
            int32_t sum = 0;
            for (int j = 0; j < QK; j++) {
                sum += blocks[i].qs[j];
            }
            memcpy(out.q(b0 + i, c), blocks[i].qs, QK);
            *out.d(b0 + i, c)     = GGML_CPU_FP16_TO_FP32(blocks[i].d);
            *out.start(b0 + i, c) = -shift * sum;
        }
    }
}

// ---- quantised weights, rows as in the file ------------------------------------------------------

#if DFLASH_LANES == 16

// 16 bytes of 16 rows -> four vectors; vector j holds bytes 4j..4j+3 of every row
inline void transpose(const char * w, size_t stride, ivec out[4]) {
    __m512i row[4];
    for (int i = 0; i < 4; i++) {  // lane l of row[i] is row 4l + i
        __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *) (w + i * stride)));
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *) (w + (4 + i) * stride)), 1);
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *) (w + (8 + i) * stride)), 2);
        row[i] = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *) (w + (12 + i) * stride)), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
    const __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), d = _mm512_unpackhi_epi32(row[2], row[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

inline fvec scales(const char * w, size_t stride) {
    const __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32((int) stride));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_i32gather_epi32(at, w, 1)));
}

inline ivec low_nibbles(ivec v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline ivec high_nibbles(ivec v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
inline ivec flip(ivec v, uint8_t bits) { return _mm512_xor_si512(v, _mm512_set1_epi8((char) bits)); }

#else

// 16 bytes of 8 rows -> four vectors; vector j holds bytes 4j..4j+3 of every row
inline void transpose(const char * w, size_t stride, ivec out[4]) {
    __m256i row[4];
    for (int i = 0; i < 4; i++) {  // lane l of row[i] is row 4l + i
        row[i] = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) (w + i * stride))),
            _mm_loadu_si128((const __m128i *) (w + (4 + i) * stride)), 1);
    }
    const __m256i a = _mm256_unpacklo_epi32(row[0], row[1]), b = _mm256_unpackhi_epi32(row[0], row[1]);
    const __m256i c = _mm256_unpacklo_epi32(row[2], row[3]), d = _mm256_unpackhi_epi32(row[2], row[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
}

inline fvec scales(const char * w, size_t stride) {
    alignas(16) ggml_half d[8];
    for (int i = 0; i < 8; i++) {
        memcpy(d + i, w + i * stride, sizeof(ggml_half));
    }
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *) d));
}

inline ivec low_nibbles(ivec v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline ivec high_nibbles(ivec v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }

#endif

struct Q8_0 {
    using block                     = block_q8_0;
    static constexpr int    SHIFT   = 128;
    static constexpr size_t SCALE   = offsetof(block_q8_0, d);

    // eight vectors; vector j holds values 4j..4j+3 of every row
    static void unpack(const char * w, size_t stride, ivec out[8]) {
        transpose(w + offsetof(block_q8_0, qs), stride, out);
        transpose(w + offsetof(block_q8_0, qs) + 16, stride, out + 4);
#if DFLASH_LANES == 16
        for (int j = 0; j < 8; j++) {
            out[j] = flip(out[j], 0x80);  // adds 128
        }
#endif
    }
};

struct Q4_0 {
    using block                     = block_q4_0;
    static constexpr int    SHIFT   = 8;
    static constexpr size_t SCALE   = offsetof(block_q4_0, d);

    static void unpack(const char * w, size_t stride, ivec out[8]) {
        ivec both[4];
        transpose(w + offsetof(block_q4_0, qs), stride, both);
        for (int j = 0; j < 4; j++) {
            out[j]     = low_nibbles(both[j]);
            out[4 + j] = high_nibbles(both[j]);
#if DFLASH_LANES == 8
            out[j]     = _mm256_sub_epi8(out[j], _mm256_set1_epi8(8));
            out[4 + j] = _mm256_sub_epi8(out[4 + j], _mm256_set1_epi8(8));
#endif
        }
    }
};

// LANES rows x C columns; the first `skip` rows are not written
template <class W, int C>
void tile(const char * w, size_t w_stride, int skip, const Columns & x, int c0, float * y, size_t y_stride) {
    const int8_t *  q     = x.q(0, c0);
    const float *   d     = x.d(0, c0);
    const int32_t * start = x.start(0, c0);
    const size_t    step  = x.stride();
    fvec            acc[C];
    for (int c = 0; c < C; c++) {
        acc[c] = fzero();
    }
    for (int64_t b = 0; b < x.n_blocks; b++) {
        ivec weights[8], sum[C];
        W::unpack(w, w_stride, weights);
        for (int r = 0; r < LANES; r++) {
            _mm_prefetch(w + (LANES + r) * w_stride, _MM_HINT_T0);  // the rows behind these
        }
        const fvec scale = scales(w + W::SCALE, w_stride);
        for (int c = 0; c < C; c++) {
            sum[c] = iset(UNSIGNED_WEIGHTS ? start[c] : 0);
        }
        for (int j = 0; j < 8; j++) {
            for (int c = 0; c < C; c++) {
                sum[c] = dot(sum[c], weights[j], quad(q + c * QK + 4 * j));
            }
        }
        for (int c = 0; c < C; c++) {
            acc[c] = fma(to_float(sum[c]), fmul(scale, fset(d[c])), acc[c]);
        }
        w += sizeof(typename W::block);
        q += step;
        d     = (const float *) ((const char *) d + step);
        start = (const int32_t *) ((const char *) start + step);
    }
    for (int c = 0; c < C; c++) {
        store((float *) ((char *) y + (c0 + c) * y_stride), acc[c], skip);
    }
}

// ---- Q4_0 in groups of eight interleaved rows ----------------------------------------------------

// Eight rows x C columns. A row's four values lie in lane pairs, whose sums meet at the end.
template <int C>
void tile_x8(const block_q4_0x8 * w, const Columns & x, int c0, float * y, size_t y_stride) {
    constexpr int PARTS = 16 / LANES;
    fvec          acc[C][PARTS];
    for (int c = 0; c < C; c++) {
        for (int p = 0; p < PARTS; p++) {
            acc[c][p] = fzero();
        }
    }
    for (int64_t b = 0; b < x.n_blocks; b++, w++) {
        _mm_prefetch((const char *) (w + x.n_blocks), _MM_HINT_T0);  // the rows behind these
        _mm_prefetch((const char *) (w + x.n_blocks) + 64, _MM_HINT_T0);
#if DFLASH_LANES == 16
        const __m256 half = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) w->d));
        const fvec scale[1] = { _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                                      _mm512_castps256_ps512(half)) };
        // stored as two's complement: flipping the top bit adds 8
        const ivec v0 = flip(_mm512_loadu_si512(w->qs), 0x88), v1 = flip(_mm512_loadu_si512(w->qs + 64), 0x88);
        const ivec weights[4][1] = { { low_nibbles(v0) }, { low_nibbles(v1) }, { high_nibbles(v0) }, { high_nibbles(v1) } };
#else
        const __m256 all = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) w->d));
        const fvec scale[2] = { _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
                                _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7)) };
        ivec weights[4][2];
        for (int h = 0; h < 2; h++) {
            for (int p = 0; p < 2; p++) {
                const ivec v = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *) (w->qs + 64 * h + 32 * p)),
                                                _mm256_set1_epi8((char) 0x88));
                weights[h][p]     = _mm256_sub_epi8(low_nibbles(v), _mm256_set1_epi8(8));
                weights[2 + h][p] = _mm256_sub_epi8(high_nibbles(v), _mm256_set1_epi8(8));
            }
        }
#endif
        for (int c = 0; c < C; c++) {
            const int8_t * q = x.q(b, c0 + c);
            ivec           sum[PARTS];
            for (int p = 0; p < PARTS; p++) {
                sum[p] = start_pair(UNSIGNED_WEIGHTS ? *x.start(b, c0 + c) : 0);
                for (int j = 0; j < 4; j++) {
                    sum[p] = dot(sum[p], weights[j][p], pair(q + 8 * j));
                }
            }
            const fvec d = fset(*x.d(b, c0 + c));
            for (int p = 0; p < PARTS; p++) {
                acc[c][p] = fma(to_float(sum[p]), fmul(scale[p], d), acc[c][p]);
            }
        }
    }
    for (int c = 0; c < C; c++) {
        alignas(64) float lane[16];
        for (int p = 0; p < PARTS; p++) {
            memcpy(lane + p * LANES, &acc[c][p], sizeof(fvec));
        }
        float * out = (float *) ((char *) y + (c0 + c) * y_stride);
        for (int r = 0; r < 8; r++) {
            out[r] = lane[2 * r] + lane[2 * r + 1];
        }
    }
}

// ---- float weights -------------------------------------------------------------------------------

inline float widen(float x) { return x; }
inline float widen(ggml_fp16_t x) { return GGML_CPU_FP16_TO_FP32(x); }
inline float widen(ggml_bf16_t x) { return GGML_BF16_TO_FP32(x); }

// R rows x C columns
template <class T, int R, int C>
void tile_float(const char * w, size_t w_stride, const char * x, size_t x_stride, int64_t k, float * y, size_t y_stride) {
    fvec acc[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            acc[r][c] = fzero();
        }
    }
    const int64_t whole = k / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        fvec weights[R];
        for (int r = 0; r < R; r++) {
            const T * from = (const T *) (w + r * w_stride) + i;
            weights[r]     = load(from);
            _mm_prefetch((const char *) from + R * w_stride, _MM_HINT_T0);  // the rows behind these
        }
        for (int c = 0; c < C; c++) {
            const fvec v = load((const float *) (x + c * x_stride) + i);
            for (int r = 0; r < R; r++) {
                acc[r][c] = fma(weights[r], v, acc[r][c]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            float sum = fsum(acc[r][c]);
            for (int64_t i = whole; i < k; i++) {
                sum += widen(((const T *) (w + r * w_stride))[i]) * ((const float *) (x + c * x_stride))[i];
            }
            ((float *) ((char *) y + c * y_stride))[r] = sum;
        }
    }
}

// ---- products ------------------------------------------------------------------------------------

bool quantized(ggml_type type) {
    return type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0;
}

bool ours(const ggml_tensor * dst) {
    const ggml_tensor * w = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    if (!ggml_dflash_mul_mat_available() || dst->op != GGML_OP_MUL_MAT) {
        return false;
    }
    const ggml_type t = w->type;
    if (!quantized(t) && t != GGML_TYPE_F32 && t != GGML_TYPE_F16 && t != GGML_TYPE_BF16) {
        return false;
    }
    return w->ne[2] == 1 && w->ne[3] == 1 && x->ne[2] == 1 && x->ne[3] == 1 &&
           x->ne[1] >= 1 && x->ne[1] <= GGML_DFLASH_MUL_MAT_MAX_COLUMNS && (w->ne[1] >= LANES || !quantized(t)) &&
           x->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32 &&
           w->nb[0] == ggml_type_size(t) && w->nb[1] >= ggml_row_size(t, w->ne[0]) && w->nb[1] < (1u << 26) &&
           x->nb[0] == sizeof(float) && dst->nb[0] == sizeof(float);
}

// Runs f(first row, rows) for groups of `size` rows, shared out among the threads as they come.
template <class F> void for_groups(const ggml_compute_params * params, int64_t n_rows, int64_t size, const F & f) {
    const int64_t n_groups = (n_rows + size - 1) / size;
    const int64_t chunk    = std::max<int64_t>(1, std::min<int64_t>(64 / size, n_groups / (4 * params->nth)));
    const int64_t n_chunks = (n_groups + chunk - 1) / chunk;
    for (int64_t i = params->ith; i < n_chunks; i = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        for (int64_t g = i * chunk; g < std::min(n_groups, (i + 1) * chunk); g++) {
            f(g * size, std::min(size, n_rows - g * size));
        }
    }
}

// Opens the sharing-out; what the threads wrote before is seen by all behind it.
void meet(const ggml_compute_params * params) {
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
}

Columns quantize_columns(const ggml_compute_params * params, const ggml_tensor * x, int shift) {
    const Columns out   = { (char *) params->wdata, x->ne[1], x->ne[0] / QK };
    const int64_t first = out.n_blocks * params->ith / params->nth;
    const int64_t last  = out.n_blocks * (params->ith + 1) / params->nth;
    for (int64_t c = 0; c < out.n; c++) {
        quantize((const float *) ((const char *) x->data + c * x->nb[1]), out, c, first, last, shift);
    }
    meet(params);
    return out;
}

// Calls f with `width` (1 to MAX) as a type.
template <int MAX, class F> void with_width(int width, const F & f) {
    if (width == MAX) {
        f(std::integral_constant<int, MAX>{});
    } else if constexpr (MAX > 1) {
        with_width<MAX - 1>(width, f);
    }
}

// Calls f(width as a type, first column) for all n columns in as few and as equal tiles as MAX allows.
template <int MAX, class F> void for_tiles(int n, const F & f) {
    for (int left = (n + MAX - 1) / MAX, c = 0; left > 0; left--) {
        const int width = (n - c + left - 1) / left;
        with_width<MAX>(width, [&](auto w) { f(w, c); });
        c += width;
    }
}

template <class W> void product(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * w = dst->src[0];
    const Columns       x = quantize_columns(params, dst->src[1], UNSIGNED_WEIGHTS ? W::SHIFT : 0);
    const int           n = (int) dst->src[1]->ne[1];
    for_groups(params, w->ne[1], LANES, [&](int64_t r, int64_t rows) {
        const int skip = LANES - (int) rows;  // the last group reaches back into the one before
        for_tiles<MAX_TILE>(n, [&](auto width, int c) {
            tile<W, decltype(width)::value>((const char *) w->data + (r - skip) * w->nb[1], w->nb[1], skip, x, c,
                                            (float *) dst->data + r - skip, dst->nb[1]);
        });
    });
}

template <class T> void product_float(const ggml_compute_params * params, ggml_tensor * dst) {
    constexpr int       MAX = LANES == 16 ? 8 : 4;
    const ggml_tensor * w   = dst->src[0];
    const ggml_tensor * x   = dst->src[1];
    meet(params);
    for_groups(params, w->ne[1], 8, [&](int64_t r0, int64_t rows) {
        for_tiles<MAX>((int) x->ne[1], [&](auto width, int c) {
            constexpr int C = decltype(width)::value;
            constexpr int R = LANES == 16 ? (C <= 2 ? 8 : C <= 6 ? 4 : 2) : (C <= 2 ? 4 : 2);
            const auto    run = [&](auto height, int64_t r) {
                tile_float<T, decltype(height)::value, C>(
                    (const char *) w->data + r * w->nb[1], w->nb[1], (const char *) x->data + c * x->nb[1], x->nb[1],
                    w->ne[0], (float *) ((char *) dst->data + c * dst->nb[1]) + r, dst->nb[1]);
            };
            int64_t r = 0;
            for (; r + R <= rows; r += R) {
                run(std::integral_constant<int, R>{}, r0 + r);
            }
            for (; r < rows; r++) {
                run(std::integral_constant<int, 1>{}, r0 + r);
            }
        });
    });
}

}  // namespace

bool ggml_dflash_mul_mat_available() {
    static const bool on = [] {
        const char * value = getenv("GGML_DFLASH_SMALL_BATCH");
        return value == nullptr || strcmp(value, "0") != 0;
    }();
    return on;
}

size_t ggml_dflash_mul_mat_work_size(const ggml_tensor * dst) {
    return ours(dst) && quantized(dst->src[0]->type) ? Columns::bytes(dst->src[1]->ne[0], dst->src[1]->ne[1]) : 0;
}

bool ggml_dflash_mul_mat(const ggml_compute_params * params, ggml_tensor * dst) {
    if (params->use_ref || !ours(dst)) {
        return false;
    }
    switch (dst->src[0]->type) {
        case GGML_TYPE_Q8_0: product<Q8_0>(params, dst); return true;
        case GGML_TYPE_Q4_0: product<Q4_0>(params, dst); return true;
        case GGML_TYPE_F32:  product_float<float>(params, dst); return true;
        case GGML_TYPE_F16:  product_float<ggml_fp16_t>(params, dst); return true;
        case GGML_TYPE_BF16: product_float<ggml_bf16_t>(params, dst); return true;
        default:             return false;
    }
}

bool ggml_dflash_mul_mat_q4_0_x8(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * w = dst->src[0];
    if (params->use_ref || !ours(dst) || w->type != GGML_TYPE_Q4_0) {
        return false;
    }
    const int     n = (int) dst->src[1]->ne[1];
    const Columns x = quantize_columns(params, dst->src[1], UNSIGNED_WEIGHTS ? Q4_0::SHIFT : 0);
    for_groups(params, w->ne[1], 8, [&](int64_t r, int64_t) {
        for_tiles<MAX_TILE>(n, [&](auto width, int c) {
            tile_x8<decltype(width)::value>((const block_q4_0x8 *) ((const char *) w->data + r * w->nb[1]), x, c,
                                            (float *) dst->data + r, dst->nb[1]);
        });
    });
    return true;
}

bool ggml_dflash_whole_keys(int64_t n_heads, int n_threads) {
    return ggml_dflash_mul_mat_available() && n_heads >= n_threads;
}

#else

bool ggml_dflash_mul_mat_available() { return false; }
size_t ggml_dflash_mul_mat_work_size(const ggml_tensor *) { return 0; }
bool ggml_dflash_mul_mat(const ggml_compute_params *, ggml_tensor *) { return false; }
bool ggml_dflash_mul_mat_q4_0_x8(const ggml_compute_params *, ggml_tensor *) { return false; }
bool ggml_dflash_whole_keys(int64_t, int) { return false; }

#endif
