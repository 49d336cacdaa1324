// Kernels for matrix products of few columns.
//
// Quantised weights: a tile is LANES rows of weights and up to MAX_TILE columns. The lanes of a
// vector are rows, so 32 values are transposed on the fly into eight vectors of four bytes per row;
// each is multiplied with the same four bytes of every column. The integer sum of a block is exact;
// then acc = fma(sum, d_w * d_x, acc), block after block. K-quants have blocks of 256 values in groups
// of 16 or 32: the sums of the groups are weighted and added up first, then d_x and acc follow. Float
// weights: the lanes are consecutive k, one accumulator per row and column, summed across lanes at the
// end. Nowhere does the order of a result's operations depend on the tile it falls into.
//
// Per 16 rows x 32 k and column the AVX-512 kernels issue 8 dot products and 3 or 4 other operations
// for 512 multiply-adds, and 20 to 60 operations to unpack, once for all columns; see docs/kernels.md.

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // both raised inside the compiler's own intrinsics
#endif

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

#include "mul-mat.h"

#include "vectors.h"

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

// four products of bytes per lane, added up
#if DFLASH_LANES == 16 || DFLASH_LANES == 4 || defined(__AVXVNNI__)
#define DFLASH_DOT
#endif

#ifdef DFLASH_LANES

namespace {

using namespace ggml_dflash;

constexpr int     MAX_TILE = LANES == 16 ? 12 : LANES == 8 ? 4 : 8;  // columns of a quantised tile: what the registers hold
constexpr int64_t QK       = 32;                                     // values of a block, except in K-quants

// ---- vectors ------------------------------------------------------------------------------------

#if DFLASH_LANES == 16

using ivec = __m512i;

inline fvec to_float(ivec a) { return _mm512_cvtepi32_ps(a); }
inline ivec iset(int32_t x) { return _mm512_set1_epi32(x); }
inline fvec magnitude(fvec a) { return _mm512_abs_ps(a); }
inline ivec dot(ivec acc, ivec w, ivec x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline ivec dot16(ivec acc, ivec w, ivec x) { return _mm512_dpwssd_epi32(acc, w, x); }
inline fvec minus(fvec c, fvec a, fvec b) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b

// rounded; 0 for what is no number below 128
inline void store_rounded(int8_t * y, fvec v) {
    const __mmask16 fits = _mm512_cmp_ps_mask(magnitude(v), fset(128), _CMP_LT_OQ);
    _mm_storeu_si128((__m128i *) y, _mm512_cvtsepi32_epi8(_mm512_maskz_cvtps_epi32(fits, v)));
}

#elif DFLASH_LANES == 8

using ivec = __m256i;

inline fvec to_float(ivec a) { return _mm256_cvtepi32_ps(a); }
inline ivec iset(int32_t x) { return _mm256_set1_epi32(x); }
inline fvec minus(fvec c, fvec a, fvec b) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b

inline fvec magnitude(fvec a) { return _mm256_andnot_ps(fset(-0.0f), a); }

// rounded; 0 for what is no number below 128
inline void store_rounded(int8_t * y, fvec v) {
    const __m256i q = _mm256_cvtps_epi32(_mm256_and_ps(v, _mm256_cmp_ps(magnitude(v), fset(128), _CMP_LT_OQ)));
    const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64((__m128i *) y, _mm_packs_epi16(w, w));
}

#ifdef DFLASH_DOT
inline ivec dot(ivec acc, ivec w, ivec x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
inline ivec dot16(ivec acc, ivec w, ivec x) { return _mm256_dpwssd_avx_epi32(acc, w, x); }
#else
inline ivec dot16(ivec acc, ivec w, ivec x) { return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x)); }
inline ivec dot8(ivec w, ivec x) { return _mm256_maddubs_epi16(w, x); }  // pairs, in 16 bits
inline ivec add16(ivec a, ivec b) { return _mm256_add_epi16(a, b); }
#endif

#else

using ivec = int32x4_t;

inline uint8x16_t bytes_of(ivec v) { return vreinterpretq_u8_s32(v); }
inline ivec       lanes_of(uint8x16_t v) { return vreinterpretq_s32_u8(v); }

inline fvec to_float(ivec a) { return vcvtq_f32_s32(a); }
inline ivec iset(int32_t x) { return vdupq_n_s32(x); }
inline fvec minus(fvec c, fvec a, fvec b) { return vfmsq_f32(c, a, b); }  // c - a * b
inline fvec magnitude(fvec a) { return vabsq_f32(a); }

// rounded; 0 for what is no number below 128
inline void store_rounded(int8_t * y, fvec v) {
    const uint32x4_t fits = vcltq_f32(magnitude(v), fset(128));
    const int16x4_t  half = vqmovn_s32(vandq_s32(vcvtnq_s32_f32(v), vreinterpretq_s32_u32(fits)));
    const int32x2_t  all  = vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(half, half)));
    memcpy(y, &all, 4);
}

// four bytes per lane of w, signed, with four bytes of x
template <int QUAD> inline ivec dot(ivec acc, ivec w, int8x16_t x) {
    return vdotq_laneq_s32(acc, vreinterpretq_s8_s32(w), x, QUAD);
}

#endif

#ifdef DFLASH_DOT

// Vectors of weights that dot_step() takes, each with the next four bytes at x in every lane.
constexpr int STEP = LANES == 4 ? 4 : 1;

#if DFLASH_LANES == 4
inline ivec dot_step(ivec acc, const ivec w[STEP], const int8_t * x) {
    const int8x16_t all = vld1q_s8(x);
    acc = dot<0>(acc, w[0], all);
    acc = dot<1>(acc, w[1], all);
    acc = dot<2>(acc, w[2], all);
    return dot<3>(acc, w[3], all);
}
#elif DFLASH_LANES == 16 && defined(__GNUC__)
inline ivec dot_step(ivec acc, const ivec w[STEP], const int8_t * x) {
    // one instruction; compilers make two of it
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w[0]), "m"(*(const int8_t (*)[4]) x));
    return acc;
}
#else
inline ivec dot_step(ivec acc, const ivec w[STEP], const int8_t * x) {
    int32_t v;
    memcpy(&v, x, 4);
    return dot(acc, w[0], iset(v));
}
#endif

#else
inline ivec quad(const int8_t * x) { int32_t v; memcpy(&v, x, 4); return iset(v); }
#endif

// ---- activations --------------------------------------------------------------------------------

// The quantised columns, block after block: for each block the 32 bytes of every column, the scales of
// all columns, and the start values of their integer sums. A tile's addresses differ by constants.
struct Columns {
    char *  data;
    int64_t n;         // columns
    int64_t n_blocks;  // blocks per column

    static constexpr int64_t BLOCK = QK;

    static size_t bytes(int64_t k, int64_t n) { return (size_t) (k / QK) * n * (QK + 8); }

    size_t    stride() const { return n * (QK + 8); }  // bytes from block to block
    int8_t *  q(int64_t b, int64_t c) const { return (int8_t *) data + b * stride() + c * QK; }
    float *   d(int64_t b, int64_t c) const { return (float *) (data + b * stride() + n * QK) + c; }
    int32_t * start(int64_t b, int64_t c) const { return (int32_t *) d(b, n) + c; }
};

// Quantises blocks [first, last) of column c as the base does; W::SHIFT is what weights are shifted by.
template <class W> void quantize(const float * x, const Columns & out, int64_t c, int64_t first, int64_t last) {
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
            *out.start(b0 + i, c) = -W::SHIFT * sum;
        }
    }
}

// The same for K-quants. What `sums` holds is the weights' choice (W::sums).
struct Column_K {
    float   d;
    int32_t sums[16];
    int8_t  q[QK_K];
};

struct Columns_K {
    char *  data;
    int64_t n;         // columns
    int64_t n_blocks;  // blocks per column

    static constexpr int64_t BLOCK = QK_K;

    static size_t bytes(int64_t k, int64_t n) { return (size_t) (k / QK_K) * n * sizeof(Column_K); }

    Column_K * at(int64_t b, int64_t c) const { return (Column_K *) data + b * n + c; }
};

// The base's quantize_row_q8_K, but faster; it may give d and all values the other sign, which cancels.
inline void quantize_k(const float * x, Column_K & out) {
    fvec top = fzero();
    for (int i = 0; i < QK_K; i += LANES) {
        top = larger(magnitude(load(x + i)), top);
    }
    const float most = largest(top);
    if (most == 0) {
        out.d = 0;
        memset(out.q, 0, QK_K);
        return;
    }
    const float inverse = 127 / most;
    out.d = 1 / inverse;
    for (int i = 0; i < QK_K; i += LANES) {
        store_rounded(out.q + i, fmul(load(x + i), fset(inverse)));
    }
}

template <class W> void quantize(const float * x, const Columns_K & out, int64_t c, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        Column_K & to = *out.at(b, c);
        quantize_k(x + b * QK_K, to);
        int32_t sums[16];
        for (int g = 0; g < 16; g++) {
            sums[g] = 0;
            for (int j = 0; j < 16; j++) {
                sums[g] += to.q[16 * g + j];
            }
        }
        W::sums(sums, to.sums);
    }
}

#if DFLASH_LANES != 4
// n numbers as pairs of 16 bits in the order in which pairs_even() and pairs_odd() take bytes apart:
// 0 and 2, 1 and 3, 4 and 6, ...
inline void to_pairs(const int32_t * x, int n, int32_t * out) {
    for (int i = 0; i < n; i += 4) {
        for (int j = 0; j < 2; j++) {
            out[i / 2 + j] = (int32_t) ((uint32_t) (x[i + j] & 0xffff) | (uint32_t) x[i + j + 2] << 16);
        }
    }
}
#endif

// ---- bytes of many rows --------------------------------------------------------------------------

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

// Four bytes of each row, at `at` and a stride apart.
inline ivec gather(const char * at, size_t stride) {
    const __m512i rows = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                            _mm512_set1_epi32((int) stride));
    return _mm512_i32gather_epi32(rows, at, 1);
}

// The lower half of each lane.
inline fvec half(ivec v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }

inline ivec  bits(ivec v, uint8_t mask) { return _mm512_and_si512(v, _mm512_set1_epi8((char) mask)); }
inline ivec  flip(ivec v, uint8_t mask) { return _mm512_xor_si512(v, _mm512_set1_epi8((char) mask)); }
template <int N> inline ivec left(ivec v) { return _mm512_slli_epi16(v, N); }
template <int N> inline ivec right(ivec v) { return _mm512_srli_epi16(v, N); }
template <int N> inline ivec right32(ivec v) { return _mm512_srli_epi32(v, N); }
inline ivec  signed_right8(ivec v) { return _mm512_srai_epi16(v, 8); }
inline ivec  low16(ivec v) { return _mm512_and_si512(v, _mm512_set1_epi32(0x00ff00ff)); }

// a | (b & mask)
inline ivec with_bits(ivec a, ivec b, uint8_t mask) {
    return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8((char) mask), 0xf8);
}

// Byte I of each lane.
template <int I> inline ivec byte(ivec v) {
    return I == 3 ? _mm512_srli_epi32(v, 24) : _mm512_and_si512(_mm512_srli_epi32(v, 8 * I), _mm512_set1_epi32(255));
}
template <int I> inline ivec signed_byte(ivec v) { return _mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * I), 24); }

#elif DFLASH_LANES == 8

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

// Four bytes of each row, at `at` and a stride apart.
inline ivec gather(const char * at, size_t stride) {
    alignas(32) int32_t v[8];
    for (int i = 0; i < 8; i++) {
        memcpy(v + i, at + i * stride, sizeof(int32_t));
    }
    return _mm256_load_si256((const __m256i *) v);
}

// The lower half of each lane.
inline fvec half(ivec v) {
    const __m256i low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08)));
}

inline ivec  bits(ivec v, uint8_t mask) { return _mm256_and_si256(v, _mm256_set1_epi8((char) mask)); }
inline ivec  flip(ivec v, uint8_t mask) { return _mm256_xor_si256(v, _mm256_set1_epi8((char) mask)); }
template <int N> inline ivec left(ivec v) { return _mm256_slli_epi16(v, N); }
template <int N> inline ivec right(ivec v) { return _mm256_srli_epi16(v, N); }
template <int N> inline ivec right32(ivec v) { return _mm256_srli_epi32(v, N); }
inline ivec  signed_right8(ivec v) { return _mm256_srai_epi16(v, 8); }
inline ivec  low16(ivec v) { return _mm256_and_si256(v, _mm256_set1_epi32(0x00ff00ff)); }

// a | (b & mask)
inline ivec with_bits(ivec a, ivec b, uint8_t mask) { return _mm256_or_si256(a, bits(b, mask)); }

#ifdef DFLASH_DOT
// Byte I of each lane.
template <int I> inline ivec byte(ivec v) {
    return I == 3 ? _mm256_srli_epi32(v, 24) : _mm256_and_si256(_mm256_srli_epi32(v, 8 * I), _mm256_set1_epi32(255));
}
template <int I> inline ivec signed_byte(ivec v) { return _mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * I), 24); }
#else
// Byte I of each lane, twice as 16 bits.
template <int I> inline ivec byte(ivec v) {
    return _mm256_shuffle_epi8(v, _mm256_add_epi32(_mm256_set1_epi32((int) (0x80008000u + 0x00010001u * I)),
                                                   _mm256_setr_epi32(0, 0x00040004, 0x00080008, 0x000c000c,
                                                                     0, 0x00040004, 0x00080008, 0x000c000c)));
}
template <int I> inline ivec signed_byte(ivec v) { return signed_right8(left<8>(byte<I>(v))); }
#endif

#else

// 16 bytes of 4 rows -> four vectors; vector j holds bytes 4j..4j+3 of every row
inline void transpose(const char * w, size_t stride, ivec out[4]) {
    int64x2_t pair[4];  // bytes 0..7 of rows 0 and 1, and of 2 and 3, then bytes 8..15
    for (int i = 0; i < 2; i++) {
        const ivec a = vreinterpretq_s32_s8(vld1q_s8((const int8_t *) w + 2 * i * stride));
        const ivec b = vreinterpretq_s32_s8(vld1q_s8((const int8_t *) w + (2 * i + 1) * stride));
        pair[i]      = vreinterpretq_s64_s32(vzip1q_s32(a, b));
        pair[2 + i]  = vreinterpretq_s64_s32(vzip2q_s32(a, b));
    }
    for (int i = 0; i < 2; i++) {
        out[2 * i]     = vreinterpretq_s32_s64(vzip1q_s64(pair[2 * i], pair[2 * i + 1]));
        out[2 * i + 1] = vreinterpretq_s32_s64(vzip2q_s64(pair[2 * i], pair[2 * i + 1]));
    }
}

// Four bytes of each row, at `at` and a stride apart.
inline ivec gather(const char * at, size_t stride) {
    int32_t v[4];
    for (int i = 0; i < 4; i++) {
        memcpy(v + i, at + i * stride, sizeof(int32_t));
    }
    return vld1q_s32(v);
}

// The lower half of each lane.
inline fvec half(ivec v) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vreinterpretq_u32_s32(v)))); }

inline ivec bits(ivec v, uint8_t mask) { return lanes_of(vandq_u8(bytes_of(v), vdupq_n_u8(mask))); }
inline ivec flip(ivec v, uint8_t mask) { return lanes_of(veorq_u8(bytes_of(v), vdupq_n_u8(mask))); }
template <int N> inline ivec right32(ivec v) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), N)); }

// each byte
template <int N> inline ivec left(ivec v) { return lanes_of(vshlq_n_u8(bytes_of(v), N)); }
template <int N> inline ivec right(ivec v) {
    if constexpr (N == 0) {
        return v;
    } else {
        return lanes_of(vshrq_n_u8(bytes_of(v), N));
    }
}

// a | (b & mask), where a has none of the mask's bits
inline ivec with_bits(ivec a, ivec b, uint8_t mask) {
    return lanes_of(vbslq_u8(vdupq_n_u8(mask), bytes_of(b), bytes_of(a)));
}

// Byte I of each lane.
template <int I> inline ivec byte(ivec v) {
    if constexpr (I == 3) {
        return right32<24>(v);
    } else {
        return vandq_s32(I == 0 ? v : right32<I == 0 ? 8 : 8 * I>(v), iset(255));
    }
}
template <int I> inline ivec signed_byte(ivec v) { return vshrq_n_s32(vshlq_n_s32(v, 24 - 8 * I), 24); }

#endif

inline fvec upper_half(ivec v) { return half(right32<16>(v)); }
inline ivec low_nibbles(ivec v) { return bits(v, 15); }

#if DFLASH_LANES == 4
inline ivec high_nibbles(ivec v) { return right<4>(v); }
#else
inline ivec high_nibbles(ivec v) { return bits(right<4>(v), 15); }

// The four bytes of each lane as two pairs of 16 bits: 0 and 2, 1 and 3.
inline ivec pairs_even(ivec v) { return low16(v); }
inline ivec pairs_odd(ivec v) { return right<8>(v); }
inline ivec signed_pairs_even(ivec v) { return signed_right8(left<8>(v)); }
inline ivec signed_pairs_odd(ivec v) { return signed_right8(v); }
#endif

// ---- how rows lie in memory ----------------------------------------------------------------------

// A layout reads N vectors of four bytes per row of a tile, which begin at byte `at` of a field, and the
// rows' halves (scales). begin() is where the blocks with row r lie, and next() what else the layout has
// to know of the tile that begins there: how far the next row is, or where in a group it begins.
struct In_file {
    static constexpr int ROWS  = 1;      // that are interleaved
    static constexpr int AHEAD = LANES;  // rows or groups behind the tile that prefetch() fetches

    static constexpr size_t next(size_t row, int64_t) { return row; }
    static constexpr size_t begin(size_t row, int64_t r) { return row * r; }

    template <int N> static void read(const void * field, int at, size_t next, ivec * out) {
        for (int i = 0; i < N; i += 4) {
            transpose((const char *) field + at + 4 * i, next, out + i);
        }
    }

    static fvec halves(const void * field, size_t next) { return half(gather((const char *) field, next)); }
    static fvec in_order(fvec v) { return v; }
};

// Rows that the base has interleaved: so many bytes of a row are followed by the same bytes of the next.
#if DFLASH_LANES == 16

// Eight bytes of eight rows: a tile is two such groups, `next` bytes apart.
struct In_x8 {
    static constexpr int ROWS  = 8;
    static constexpr int AHEAD = LANES / 8;

    static constexpr size_t next(size_t row, int64_t) { return 8 * row; }
    static constexpr size_t begin(size_t row, int64_t r) { return row * r; }

    template <int N> static void read(const void * field, int at, size_t next, ivec * out) {
        const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const char *  from  = (const char *) field + 8 * at;
        for (int i = 0; i < N; i += 2) {
            const __m512i a = _mm512_loadu_si512(from + 32 * i), b = _mm512_loadu_si512(from + 32 * i + next);
            out[i]     = _mm512_permutex2var_epi32(a, first, b);
            out[i + 1] = _mm512_permutex2var_epi32(a, _mm512_add_epi32(first, iset(1)), b);
        }
    }

    static fvec halves(const void * field, size_t next) {
        return _mm512_cvtph_ps(_mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) field)),
            _mm_loadu_si128((const __m128i *) ((const char *) field + next)), 1));
    }
    static fvec in_order(fvec v) { return v; }
};

#elif DFLASH_LANES == 8

// Eight bytes of eight rows. The rows of a vector come as 0 1 4 5 2 3 6 7, which saves a shuffle per
// vector; in_order() is for those few that matter.
struct In_x8 {
    static constexpr int ROWS  = 8;
    static constexpr int AHEAD = LANES / 8;

    static constexpr size_t next(size_t row, int64_t) { return 8 * row; }
    static constexpr size_t begin(size_t row, int64_t r) { return row * r; }

    template <int N> static void read(const void * field, int at, size_t, ivec * out) {
        const float * from = (const float *) field + 2 * at;
        for (int i = 0; i < N; i += 2) {
            const __m256 a = _mm256_loadu_ps(from + 8 * i), b = _mm256_loadu_ps(from + 8 * i + 8);
            out[i]     = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
            out[i + 1] = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
        }
    }

    static fvec halves(const void * field, size_t) {
        return in_order(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) field)));
    }

    // its own inverse
    static fvec in_order(fvec v) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0xd8)); }
};

#else

// Four or eight bytes of four or eight rows: a tile is four rows of a group, from row `next` on. Groups
// are one stream, which hardware prefetchers foresee.
template <int BYTES, int N_ROWS> struct In_groups {
    static constexpr int ROWS  = N_ROWS;
    static constexpr int AHEAD = 0;

    static constexpr size_t next(size_t, int64_t r) { return r % ROWS; }
    static constexpr size_t begin(size_t row, int64_t r) { return row * (r / ROWS * ROWS); }

    template <int N> static void read(const void * field, int at, size_t next, ivec * out) {
        const int8_t * from = (const int8_t *) field + ROWS * at + BYTES * next;
        for (int i = 0; i < N; i += BYTES / 4) {
            const ivec a = vreinterpretq_s32_s8(vld1q_s8(from + 4 * ROWS * i));
            if constexpr (BYTES == 4) {
                out[i] = a;
            } else {
                const ivec b = vreinterpretq_s32_s8(vld1q_s8(from + 4 * ROWS * i + 16));
                out[i]       = vuzp1q_s32(a, b);
                out[i + 1]   = vuzp2q_s32(a, b);
            }
        }
    }

    static fvec halves(const void * field, size_t next) { return load((const ggml_fp16_t *) field + next); }
    static fvec in_order(fvec v) { return v; }
};

#endif

// Block types by how many rows they hold.
template <class L, class One, class Four, class Eight>
using block_of = std::conditional_t<L::ROWS == 1, One, std::conditional_t<L::ROWS == 4, Four, Eight>>;

// Fetches part `part` of `parts` of the blocks beside this one in the rows behind this tile's.
template <class W> inline void prefetch(const char * w, size_t next, int part, int parts) {
    const int lines = (int) (sizeof(typename W::block) + 63) / 64;
    for (int l = lines * part / parts; l < lines * (part + 1) / parts; l++) {
        for (int r = 0; r < W::AHEAD; r++) {
            fetch(w + (W::AHEAD + r) * next + 64 * l);
        }
    }
}

// ---- weights in blocks of 32 ---------------------------------------------------------------------

template <class L> struct Q8_0 : L {
    using columns = Columns;
    using block   = block_of<L, block_q8_0, block_q8_0x4, block_q8_0x8>;
#if defined(DFLASH_DOT) && DFLASH_LANES != 4
    static constexpr int SHIFT = 128;  // x86's dot product wants one unsigned side
#else
    static constexpr int SHIFT = 0;
#endif

    // eight vectors; vector j holds values 4j..4j+3 of every row
    static void unpack(const char * w, size_t next, ivec out[8]) {
        L::template read<8>(w + offsetof(block, qs), 0, next, out);
        for (int j = 0; j < 8; j++) {
            out[j] = flip(out[j], SHIFT);
        }
    }

    static fvec scales(const char * w, size_t next) { return L::halves(w + offsetof(block, d), next); }
};

template <class L> struct Q4_0 : L {
    using columns = Columns;
    using block   = block_of<L, block_q4_0, block_q4_0x4, block_q4_0x8>;
    static constexpr int SHIFT = 8;

    static void unpack(const char * w, size_t next, ivec out[8]) {
        ivec both[4];
        L::template read<4>(w + offsetof(block, qs), 0, next, both);
        for (int j = 0; j < 4; j++) {
            // interleaved as two's complement: flipping the top bit adds 8
            both[j]    = L::ROWS == 1 ? both[j] : flip(both[j], 0x88);
            out[j]     = low_nibbles(both[j]);
            out[4 + j] = high_nibbles(both[j]);
        }
    }

    static fvec scales(const char * w, size_t next) { return L::halves(w + offsetof(block, d), next); }
};

// Adds to sum[c] the products of a block's weights with column c.
template <class W, int C> inline void add_block(const ivec weights[8], const int8_t * q, ivec sum[C]) {
#ifdef DFLASH_DOT
    for (int j = 0; j < 8; j += STEP) {
        for (int c = 0; c < C; c++) {
            sum[c] = dot_step(sum[c], weights + j, q + c * QK + 4 * j);
        }
    }
#else
    const ivec one = _mm256_set1_epi16(1);
    for (int c = 0; c < C; c++) {
        if constexpr (W::SHIFT == 0) {
            for (int j = 0; j < 8; j++) {  // |w| <= 128 and |x| <= 127: two products fit 16 bits
                const ivec x = _mm256_sign_epi8(quad(q + c * QK + 4 * j), weights[j]);
                sum[c] = dot16(sum[c], dot8(_mm256_abs_epi8(weights[j]), x), one);
            }
        } else {
            ivec s = dot8(weights[0], quad(q + c * QK));  // 0 <= w < 16: sixteen products fit
            for (int j = 1; j < 8; j++) {
                s = add16(s, dot8(weights[j], quad(q + c * QK + 4 * j)));
            }
            sum[c] = dot16(sum[c], s, one);
        }
    }
#endif
}

template <class W, int C> void store_tile(const fvec acc[C], int skip, float * y, size_t y_stride) {
    for (int c = 0; c < C; c++) {
        store((float *) ((char *) y + c * y_stride), W::in_order(acc[c]), skip);
    }
}

// LANES rows x C columns; the first `skip` rows are not written
template <class W, int C>
void tile(const char * w, size_t next, int skip, const Columns & x, int c0, float * y, size_t y_stride) {
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
        W::unpack(w, next, weights);
        prefetch<W>(w, next, 0, 1);
        const fvec scale = W::scales(w, next);
        for (int c = 0; c < C; c++) {
            sum[c] = iset(W::SHIFT == 0 ? 0 : start[c]);
        }
        add_block<W, C>(weights, q, sum);
        for (int c = 0; c < C; c++) {
            acc[c] = fma(to_float(sum[c]), fmul(scale, fset(d[c])), acc[c]);
        }
        w += sizeof(typename W::block);
        q += step;
        d     = (const float *) ((const char *) d + step);
        start = (const int32_t *) ((const char *) start + step);
    }
    store_tile<W, C>(acc, skip, (float *) ((char *) y + c0 * y_stride), y_stride);
}

// ---- K-quants ------------------------------------------------------------------------------------

// A block's 256 values are unpacked in four steps of two times 32: J = 0..3, and HIGH for the second,
// which shares its bytes with the first. With a dot product instruction the groups' sums are weighted
// and added up as floats, else as integers, which are exact until the end.

#ifdef DFLASH_DOT
using partial = fvec;
using weight  = fvec;  // of a group: d * its scale
inline partial nothing() { return fzero(); }
#else
using partial = ivec;
using weight  = ivec;  // its scale, twice as 16 bits
inline partial nothing() { return iset(0); }
#endif

// High nibbles, 16 times as large where that spares a shift: the weight makes up for it.
#if defined(DFLASH_DOT) && DFLASH_LANES != 4
constexpr bool LARGE = true;
inline ivec large_nibbles(ivec v) { return bits(v, 0xf0); }
#else
constexpr bool LARGE = false;
inline ivec large_nibbles(ivec v) { return high_nibbles(v); }
#endif

inline weight group_weight(ivec scale, fvec d) {
#ifdef DFLASH_DOT
    return fmul(to_float(scale), d);
#else
    (void) d;
    return scale;
#endif
}

// What Q4_K and Q5_K have in common: eight groups of 32 with scales and minimums of 6 bits.
struct Minimums {
    using columns = Columns_K;
    static constexpr int  GROUP   = 32;
    static constexpr bool SHIFTED = false;

    static void sums(const int32_t of16[16], int32_t out[16]) {
        int32_t of32[8];
        for (int g = 0; g < 8; g++) {
            of32[g] = of16[2 * g] + of16[2 * g + 1];
        }
#if DFLASH_LANES == 4
        int8_t * bytes = (int8_t *) out;  // 64 * the second eight + the first, which are not negative
        for (int g = 0; g < 8; g++) {
            bytes[g]     = (int8_t) (of32[g] & 63);
            bytes[8 + g] = (int8_t) (of32[g] >> 6);  // |of32| <= 32 * 127
        }
#else
        to_pairs(of32, 8, out);
#endif
    }

    static constexpr int position(int j, bool high) { return 64 * j + 32 * high; }

    template <class Head> static fvec finish(const Head & head, partial p, const Column_K & x) {
#if DFLASH_LANES == 4
        const int8x16_t sums = vld1q_s8((const int8_t *) x.sums);
        const ivec      low  = dot<1>(dot<0>(iset(0), head.mins[0], sums), head.mins[1], sums);
        const ivec      high = dot<3>(dot<2>(iset(0), head.mins[0], sums), head.mins[1], sums);
        const ivec      m    = vaddq_s32(low, vshlq_n_s32(high, 6));
#else
        ivec m = iset(0);
        m = dot16(m, head.template minimums<0>(), iset(x.sums[0]));
        m = dot16(m, head.template minimums<1>(), iset(x.sums[1]));
        m = dot16(m, head.template minimums<2>(), iset(x.sums[2]));
        m = dot16(m, head.template minimums<3>(), iset(x.sums[3]));
#endif
#ifdef DFLASH_DOT
        return minus(p, head.dmin, to_float(m));
#else
        return minus(fmul(head.d, to_float(p)), head.dmin, to_float(m));
#endif
    }
};

// A block's scales. The lanes are rows; scales and minimums have a byte per group.
struct Minimums_head {
    fvec d, d_high, dmin;
    ivec scales[2], mins[2];

    template <int G> weight group() const { return group_weight(byte<G % 4>(scales[G / 4]), G % 2 ? d_high : d); }
#if DFLASH_LANES != 4
    template <int P> ivec minimums() const { return P % 2 ? pairs_odd(mins[P / 2]) : pairs_even(mins[P / 2]); }
#endif
};

template <class Block, class L, bool LARGE> struct Head_of;  // of Q4_K and Q5_K; LARGE if odd groups' values are

template <class Block, bool LARGE> struct Head_of<Block, In_file, LARGE> : Minimums_head {
    Head_of(const char * w, size_t next) {
        ivec v[4];
        transpose(w, next, v);
        d         = half(v[0]);
        d_high    = LARGE ? fmul(d, fset(1.0f / 16)) : d;
        dmin      = upper_half(v[0]);
        scales[0] = bits(v[1], 0x3f);
        mins[0]   = bits(v[2], 0x3f);
        scales[1] = with_bits(low_nibbles(v[3]), right<2>(v[1]), 0x30);
        mins[1]   = with_bits(high_nibbles(v[3]), right<2>(v[2]), 0x30);
    }
};

// Interleaved, the scales and minimums of group g are 12 bytes: those of rows 0 to 3, their minimums, each
// with two upper bits of a later row's on top, and the lower four bits of the others'.
#if DFLASH_LANES == 4

// four groups' bytes of four rows -> lanes are rows, bytes are groups
inline ivec turned(ivec v) {
    static const uint8_t from[16] = { 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15 };
    return lanes_of(vqtbl1q_u8(bytes_of(v), vld1q_u8(from)));
}

template <class Block, int BYTES, bool LARGE> struct Head_of<Block, In_groups<BYTES, 8>, LARGE> : Minimums_head {
    Head_of(const char * w, size_t next) {
        d = d_high = In_groups<BYTES, 8>::halves(w + offsetof(Block, d), next);
        dmin       = In_groups<BYTES, 8>::halves(w + offsetof(Block, dmin), next);
        for (int i = 0; i < 2; i++) {
            const uint32x4x3_t v = vld3q_u32((const uint32_t *) (w + offsetof(Block, scales)) + 12 * i);
            const ivec s = vreinterpretq_s32_u32(v.val[0]), m = vreinterpretq_s32_u32(v.val[1]);
            const ivec rest = vreinterpretq_s32_u32(v.val[2]);
            scales[i] = turned(next == 0 ? bits(s, 0x3f) : with_bits(low_nibbles(rest), right<2>(s), 0x30));
            mins[i]   = turned(next == 0 ? bits(m, 0x3f) : with_bits(high_nibbles(rest), right<2>(m), 0x30));
        }
    }
};

#else

template <class Block, bool LARGE> struct Head_of<Block, In_x8, LARGE> {
    fvec d, d_high, dmin;
#if DFLASH_LANES == 16
    alignas(64) uint8_t scales[8][16], mins[8][16];  // groups in the order of at()

    Head_of(const char * w, size_t next) {
        d      = In_x8::halves(w + offsetof(Block, d), next);
        d_high = fmul(d, fset(1.0f / 16));
        dmin   = In_x8::halves(w + offsetof(Block, dmin), next);
        ivec s[2], m[2];
        bytes(w + offsetof(Block, scales), s[0], m[0]);
        bytes(w + offsetof(Block, scales) + next, s[1], m[1]);
        _mm512_store_si512(scales[0], _mm512_unpacklo_epi64(s[0], s[1]));
        _mm512_store_si512(scales[4], _mm512_unpackhi_epi64(s[0], s[1]));
        _mm512_store_si512(mins[0], _mm512_unpacklo_epi64(m[0], m[1]));
        _mm512_store_si512(mins[4], _mm512_unpackhi_epi64(m[0], m[1]));
    }

    // of eight rows, eight bytes per group
    static void bytes(const char * from, ivec & s, ivec & m) {
        const ivec a = _mm512_loadu_si512(from);
        const ivec b = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) (from + 64)));
        const ivec at = _mm512_setr_epi32(0, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20, 21, 23);
        const ivec ms = _mm512_setr_epi32(1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23);
        s = merge(_mm512_permutex2var_epi32(a, at, b), _mm512_setzero_si512());
        m = merge(_mm512_permutex2var_epi32(a, ms, b), _mm512_set1_epi64(4ll << 32));
    }

    // lane pairs: six bits of four rows, and four bits, at `shift`, of the others
    static ivec merge(ivec v, ivec shift) {
        const ivec low = _mm512_and_si512(_mm512_srlv_epi32(v, shift), _mm512_set1_epi64(0x0f0f0f0f3f3f3f3fll));
        const ivec top = _mm512_set1_epi64(0x3030303000000000ll);
        return _mm512_ternarylogic_epi32(low, _mm512_slli_epi64(v, 30), top, 0xf8);
    }

    static constexpr int at(int g) { return g / 2 + 4 * (g % 2); }

    template <int G> static ivec lanes(const uint8_t (&v)[8][16]) {
        return _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *) v[at(G)]));
    }

    template <int G> weight group() const { return group_weight(lanes<G>(scales), G % 2 ? d_high : d); }
    template <int P> ivec minimums() const {
        constexpr int G = 4 * (P / 2) + P % 2;
        return _mm512_or_si512(lanes<G>(mins), _mm512_slli_epi32(lanes<G + 2>(mins), 16));
    }
#else
    alignas(16) uint8_t scales[8][16];  // a group's eight scales and eight minimums

    Head_of(const char * w, size_t next) {
        d      = In_x8::halves(w + offsetof(Block, d), next);
        d_high = fmul(d, fset(1.0f / 16));
        dmin   = In_x8::halves(w + offsetof(Block, dmin), next);
        for (int g = 0; g < 8; g++) {  // the last one reads four bytes of the quants
            const __m128i v   = _mm_shuffle_epi32(
                _mm_loadu_si128((const __m128i *) (w + offsetof(Block, scales) + 12 * g)), _MM_SHUFFLE(2, 1, 2, 0));
            const __m128i low = _mm_and_si128(_mm_srlv_epi32(v, _mm_setr_epi32(0, 0, 0, 4)),
                                              _mm_set1_epi64x(0x0f0f0f0f3f3f3f3fll));
            const __m128i top = _mm_and_si128(_mm_slli_epi64(v, 30), _mm_set1_epi64x(0x3030303000000000ll));
            const __m128i all = _mm_shufflelo_epi16(_mm_or_si128(low, top), _MM_SHUFFLE(3, 1, 2, 0));
            _mm_store_si128((__m128i *) scales[g], _mm_shufflehi_epi16(all, _MM_SHUFFLE(3, 1, 2, 0)));
        }
    }

    // bytes of two kinds as pairs of 16 bits
    static ivec zip(const uint8_t * a, const uint8_t * b) {
        return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *) a),
                                                      _mm_loadl_epi64((const __m128i *) b)));
    }

    template <int G> weight group() const {
#ifdef DFLASH_DOT
        return group_weight(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) scales[G])), G % 2 ? d_high : d);
#else
        return zip(scales[G], scales[G]);
#endif
    }
    template <int P> ivec minimums() const {
        constexpr int G = 4 * (P / 2) + P % 2;
        return zip(scales[G] + 8, scales[G + 2] + 8);
    }
#endif
};

#endif

template <class L> struct Q4_K : Minimums, L {
    using block = block_of<L, block_q4_K, void, block_q4_Kx8>;
    using Head  = Head_of<block, L, LARGE>;
    static constexpr int FIT = 8;  // vectors whose products add up in 16 bits: 16 * 15 * 127

    struct Bytes {
        ivec v[8];

        template <int J> void load(const char * w, size_t next) {
            L::template read<8>(w + offsetof(block, qs), 32 * J, next, v);
        }

        template <int J, bool HIGH> ivec values(int i) const { return HIGH ? large_nibbles(v[i]) : low_nibbles(v[i]); }
    };
};

template <class L> struct Q5_K : Minimums, L {
    using block = block_of<L, block_q5_K, void, block_q5_Kx8>;
    using Head  = Head_of<block, L, false>;
    static constexpr int FIT = 4;  // 8 * 31 * 127

    struct Bytes {
        ivec v[8], fifth[8];  // bit g of `fifth` belongs to group g

        template <int J> void load(const char * w, size_t next) {
            if (J == 0) {
                L::template read<8>(w + offsetof(block, qh), 0, next, fifth);
            }
            L::template read<8>(w + offsetof(block, qs), 32 * J, next, v);
        }

        template <int J, bool HIGH> ivec values(int i) const {
            constexpr int BIT = 2 * J + HIGH;
            const ivec    top = BIT <= 4 ? left<BIT <= 4 ? 4 - BIT : 0>(fifth[i]) : right<BIT <= 4 ? 0 : BIT - 4>(fifth[i]);
            return with_bits(HIGH ? high_nibbles(v[i]) : low_nibbles(v[i]), top, 0x10);
        }
    };
};

template <class L> struct Q6_K : L {
    using columns = Columns_K;
    using block   = block_of<L, block_q6_K, void, block_q6_Kx8>;
    static constexpr int  GROUP   = 16;
    static constexpr int  FIT     = 2;  // 4 * 63 * 127
    static constexpr bool SHIFTED = true;

    // what the shift by 32 adds to the groups' sums
    static void sums(const int32_t of16[16], int32_t out[16]) {
#ifdef DFLASH_DOT
        for (int g = 0; g < 16; g++) {
            out[g] = -32 * of16[g];
        }
#else
        to_pairs(of16, 16, out);
#endif
    }

    static constexpr int position(int j, bool high) { return 128 * (j / 2) + 64 * high + 32 * (j % 2); }

    struct Head {
        fvec d;
        ivec scales[4];

        Head(const char * w, size_t next) {
            if constexpr (L::ROWS == 1) {
                transpose(w + offsetof(block, scales), next, scales);
                d = upper_half(gather(w + offsetof(block, d) - 2, next));  // nothing may be read behind it
            } else {
#if DFLASH_LANES == 4
                for (int i = 0; i < 4; i++) {
                    scales[i] = turned(gather(w + offsetof(block, scales) + 8 * 4 * i + next, 8));
                }
                d = L::halves(w + offsetof(block, d), next);
#endif
            }
        }

        template <int G> weight group() const { return group_weight(signed_byte<G % 4>(scales[G / 4]), d); }
    };

    struct Bytes {
        ivec v[8], top[8];

        template <int J> void load(const char * w, size_t next) {
            if (J % 2 == 0) {
                L::template read<8>(w + offsetof(block, qh), 16 * J, next, top);
            }
            L::template read<8>(w + offsetof(block, ql), 32 * J, next, v);
        }

        template <int J, bool HIGH> ivec values(int i) const {
            constexpr int BIT = 2 * (J % 2) + 4 * HIGH;
            const ivec    t   = BIT <= 4 ? left<BIT <= 4 ? 4 - BIT : 0>(top[i]) : right<BIT <= 4 ? 0 : BIT - 4>(top[i]);
            return with_bits(HIGH ? high_nibbles(v[i]) : low_nibbles(v[i]), t, 0x30);
        }
    };

    static fvec finish(const Head & head, partial p, const Column_K & x) {
#ifdef DFLASH_DOT
        (void) head, (void) x;
        return p;
#else
        ivec m = iset(0);
        for (int g = 0; g < 4; g++) {
            m = dot16(m, signed_pairs_even(head.scales[g]), iset(x.sums[2 * g]));
            m = dot16(m, signed_pairs_odd(head.scales[g]), iset(x.sums[2 * g + 1]));
        }
        return fmul(head.d, to_float(_mm256_sub_epi32(p, _mm256_slli_epi32(m, 5))));
#endif
    }
};

// Adds to p[c] the weighted sum of group G with column c; the group's bytes are v[i], i from `first`.
template <class W, int C, int J, bool HIGH, int FIRST>
inline void add_group(const typename W::Head & head, const typename W::Bytes & bytes, const Column_K * x, partial p[C]) {
    constexpr int POSITION = W::position(J, HIGH) + 4 * FIRST;
    constexpr int G = POSITION / W::GROUP, N = W::GROUP / 4;
    const weight  scale = head.template group<G>();
#ifdef DFLASH_DOT
    ivec sum[C];
    for (int c = 0; c < C; c++) {
        sum[c] = iset(W::SHIFTED ? x[c].sums[G] : 0);
    }
    for (int i = 0; i < N; i += STEP) {
        ivec w[STEP];
        for (int s = 0; s < STEP; s++) {
            w[s] = bytes.template values<J, HIGH>(FIRST + i + s);
        }
        for (int c = 0; c < C; c++) {
            sum[c] = dot_step(sum[c], w, x[c].q + POSITION + 4 * i);
        }
    }
    for (int c = 0; c < C; c++) {
        p[c] = fma(to_float(sum[c]), scale, p[c]);
    }
#else
    for (int i0 = 0; i0 < N; i0 += W::FIT) {
        ivec s[C];
        for (int i = 0; i < W::FIT; i++) {
            const ivec w = bytes.template values<J, HIGH>(FIRST + i0 + i);
            for (int c = 0; c < C; c++) {
                const ivec v = dot8(w, quad(x[c].q + POSITION + 4 * (i0 + i)));
                s[c] = i ? add16(s[c], v) : v;
            }
        }
        for (int c = 0; c < C; c++) {
            p[c] = dot16(p[c], s[c], scale);
        }
    }
#endif
}

template <class W, int C, int J>
inline void add_step(const char * w, size_t next, const typename W::Head & head, typename W::Bytes & bytes,
                     const Column_K * x, partial p[C]) {
    bytes.template load<J>(w, next);
    prefetch<W>(w, next, J, 4);
    add_group<W, C, J, false, 0>(head, bytes, x, p);
    if constexpr (W::GROUP == 16) {
        add_group<W, C, J, false, 4>(head, bytes, x, p);
    }
    add_group<W, C, J, true, 0>(head, bytes, x, p);
    if constexpr (W::GROUP == 16) {
        add_group<W, C, J, true, 4>(head, bytes, x, p);
    }
}

// LANES rows x C columns; the first `skip` rows are not written
template <class W, int C>
void tile(const char * w, size_t next, int skip, const Columns_K & x, int c0, float * y, size_t y_stride) {
    fvec acc[C];
    for (int c = 0; c < C; c++) {
        acc[c] = fzero();
    }
    for (int64_t b = 0; b < x.n_blocks; b++, w += sizeof(typename W::block)) {
        const Column_K *       column = x.at(b, c0);
        const typename W::Head head(w, next);
        typename W::Bytes      bytes;
        partial                p[C];
        for (int c = 0; c < C; c++) {
            p[c] = nothing();
        }
        add_step<W, C, 0>(w, next, head, bytes, column, p);
        add_step<W, C, 1>(w, next, head, bytes, column, p);
        add_step<W, C, 2>(w, next, head, bytes, column, p);
        add_step<W, C, 3>(w, next, head, bytes, column, p);
        for (int c = 0; c < C; c++) {
            acc[c] = fma(W::finish(head, p[c], column[c]), fset(column[c].d), acc[c]);
        }
    }
    store_tile<W, C>(acc, skip, (float *) ((char *) y + c0 * y_stride), y_stride);
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
            fetch((const char *) from + R * w_stride);  // the rows behind these
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

bool k_quant(ggml_type type) {
    return type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K || type == GGML_TYPE_Q6_K;
}

bool quantized(ggml_type type) {
    return type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0 || k_quant(type);
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
           x->ne[1] >= 1 && x->ne[1] <= GGML_DFLASH_MUL_MAT_MAX_COLUMNS &&
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

template <class W> typename W::columns quantize_columns(const ggml_compute_params * params, const ggml_tensor * x) {
    using columns = typename W::columns;
    const columns out   = { (char *) params->wdata, x->ne[1], x->ne[0] / columns::BLOCK };
    const int64_t first = out.n_blocks * params->ith / params->nth;
    const int64_t last  = out.n_blocks * (params->ith + 1) / params->nth;
    for (int64_t c = 0; c < out.n; c++) {
        quantize<W>((const float *) ((const char *) x->data + c * x->nb[1]), out, c, first, last);
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
    const ggml_tensor * w    = dst->src[0];
    const auto          x    = quantize_columns<W>(params, dst->src[1]);
    const int           n    = (int) dst->src[1]->ne[1];
    const auto          run  = [&](int64_t r, size_t next, int skip, int64_t back) {
        for_tiles<MAX_TILE>(n, [&](auto width, int c) {
            tile<W, decltype(width)::value>((const char *) w->data + W::begin(w->nb[1], r - back), next, skip, x, c,
                                            (float *) dst->data + r - skip, dst->nb[1]);
        });
    };
    if (w->ne[1] < LANES) {  // too few for a tile: each row (or group) in all lanes, and written from the last
        constexpr int AT_ONCE = std::min(W::ROWS, LANES);
        for_groups(params, w->ne[1], AT_ONCE, [&](int64_t r, int64_t) { run(r, 0, LANES - AT_ONCE, 0); });
        return;
    }
    for_groups(params, w->ne[1], LANES, [&](int64_t r, int64_t rows) {
        const int skip = LANES - (int) rows;  // the last tile reaches back into the one before
        run(r, W::next(w->nb[1], r - skip), skip, skip);
    });
}

template <class T> void product_float(const ggml_compute_params * params, ggml_tensor * dst) {
    constexpr int       MAX = MANY_REGISTERS ? 8 : 4;
    const ggml_tensor * w   = dst->src[0];
    const ggml_tensor * x   = dst->src[1];
    meet(params);
    for_groups(params, w->ne[1], 8, [&](int64_t r0, int64_t rows) {
        for_tiles<MAX>((int) x->ne[1], [&](auto width, int c) {
            constexpr int C = decltype(width)::value;
            constexpr int R = MANY_REGISTERS ? (C <= 2 ? 8 : C <= 6 ? 4 : 2) : (C <= 2 ? 4 : 2);
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
    if (!ours(dst) || !quantized(dst->src[0]->type)) {
        return 0;
    }
    const int64_t k = dst->src[1]->ne[0], n = dst->src[1]->ne[1];
    return k_quant(dst->src[0]->type) ? Columns_K::bytes(k, n) : Columns::bytes(k, n);
}

bool ggml_dflash_mul_mat(const ggml_compute_params * params, ggml_tensor * dst) {
    if (params->use_ref || !ours(dst)) {
        return false;
    }
    switch (dst->src[0]->type) {
        case GGML_TYPE_Q8_0: product<Q8_0<In_file>>(params, dst); return true;
        case GGML_TYPE_Q4_0: product<Q4_0<In_file>>(params, dst); return true;
        case GGML_TYPE_Q4_K: product<Q4_K<In_file>>(params, dst); return true;
        case GGML_TYPE_Q5_K: product<Q5_K<In_file>>(params, dst); return true;
        case GGML_TYPE_Q6_K: product<Q6_K<In_file>>(params, dst); return true;
        case GGML_TYPE_F32:  product_float<float>(params, dst); return true;
        case GGML_TYPE_F16:  product_float<ggml_fp16_t>(params, dst); return true;
        case GGML_TYPE_BF16: product_float<ggml_bf16_t>(params, dst); return true;
        default:             return false;
    }
}

#if DFLASH_LANES == 4
template <int BYTES, int ROWS> static bool product_interleaved(const ggml_compute_params * params, ggml_tensor * dst) {
    using L = In_groups<BYTES, ROWS>;
    const ggml_type type = dst->src[0]->type;
    if (type == GGML_TYPE_Q8_0) {
        product<Q8_0<L>>(params, dst);
    } else if (type == GGML_TYPE_Q4_0) {
        product<Q4_0<L>>(params, dst);
    } else if constexpr (ROWS == 4) {
        return false;
    } else if (type == GGML_TYPE_Q4_K) {
        product<Q4_K<L>>(params, dst);
    } else if (type == GGML_TYPE_Q5_K) {
        product<Q5_K<L>>(params, dst);
    } else if (type == GGML_TYPE_Q6_K) {
        product<Q6_K<L>>(params, dst);
    } else {
        return false;
    }
    return true;
}
#endif

bool ggml_dflash_mul_mat_interleaved(const ggml_compute_params * params, ggml_tensor * dst, int bytes, int rows) {
    if (params->use_ref || !ours(dst)) {
        return false;
    }
#if DFLASH_LANES == 4
    if (rows == 4) {
        return bytes == 4   ? product_interleaved<4, 4>(params, dst)
               : bytes == 8 ? product_interleaved<8, 4>(params, dst)
                            : false;
    }
    if (rows == 8) {
        return bytes == 4   ? product_interleaved<4, 8>(params, dst)
               : bytes == 8 ? product_interleaved<8, 8>(params, dst)
                            : false;
    }
    return false;
#else
    if (bytes != 8 || rows != 8) {
        return false;
    }
    switch (dst->src[0]->type) {
        case GGML_TYPE_Q4_0: product<Q4_0<In_x8>>(params, dst); return true;
        case GGML_TYPE_Q4_K: product<Q4_K<In_x8>>(params, dst); return true;
        default:             return false;
    }
#endif
}

bool ggml_dflash_whole_keys(int64_t n_heads, int n_threads) {
    return ggml_dflash_mul_mat_available() && n_heads >= n_threads;
}

#else

bool ggml_dflash_mul_mat_available() { return false; }
size_t ggml_dflash_mul_mat_work_size(const ggml_tensor *) { return 0; }
bool ggml_dflash_mul_mat(const ggml_compute_params *, ggml_tensor *) { return false; }
bool ggml_dflash_mul_mat_interleaved(const ggml_compute_params *, ggml_tensor *, int, int) { return false; }
bool ggml_dflash_whole_keys(int64_t, int) { return false; }

#endif
