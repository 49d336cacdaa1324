// Vectors of floats for the kernels here: DFLASH_LANES is 16 (AVX-512) or 8 (AVX2), not defined where there is neither.
#pragma once

#include "ggml.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define DFLASH_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DFLASH_LANES 8
#endif

#ifdef DFLASH_LANES

#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace ggml_dflash {

constexpr int LANES = DFLASH_LANES;

#if DFLASH_LANES == 16

using fvec = __m512;

inline fvec fzero() { return _mm512_setzero_ps(); }
inline fvec fset(float x) { return _mm512_set1_ps(x); }
inline fvec fadd(fvec a, fvec b) { return _mm512_add_ps(a, b); }
inline fvec fsub(fvec a, fvec b) { return _mm512_sub_ps(a, b); }
inline fvec fmul(fvec a, fvec b) { return _mm512_mul_ps(a, b); }
inline fvec fma(fvec a, fvec b, fvec c) { return _mm512_fmadd_ps(a, b, c); }
inline float fsum(fvec a) { return _mm512_reduce_add_ps(a); }
inline fvec larger(fvec a, fvec b) { return _mm512_max_ps(a, b); }  // b if one is no number
inline float largest(fvec a) { return _mm512_reduce_max_ps(a); }
inline uint64_t above_mask(fvec a, fvec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }  // bit per lane
inline fvec load(const float * x) { return _mm512_loadu_ps(x); }
inline fvec load(const ggml_fp16_t * x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) x)); }
inline fvec load(const ggml_bf16_t * x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) x)), 16));
}
inline void store(float * y, fvec v) { _mm512_storeu_ps(y, v); }

// all lanes but the first `skip`
inline void store(float * y, fvec v, int skip) {
    _mm512_mask_storeu_ps(y, (__mmask16) (0xffffu << skip), v);
}

#else

using fvec = __m256;

inline fvec fzero() { return _mm256_setzero_ps(); }
inline fvec fset(float x) { return _mm256_set1_ps(x); }
inline fvec fadd(fvec a, fvec b) { return _mm256_add_ps(a, b); }
inline fvec fsub(fvec a, fvec b) { return _mm256_sub_ps(a, b); }
inline fvec fmul(fvec a, fvec b) { return _mm256_mul_ps(a, b); }
inline fvec fma(fvec a, fvec b, fvec c) { return _mm256_fmadd_ps(a, b, c); }
inline fvec larger(fvec a, fvec b) { return _mm256_max_ps(a, b); }  // b if one is no number
inline uint64_t above_mask(fvec a, fvec b) {  // bit per lane
    return (uint32_t) _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
inline fvec load(const float * x) { return _mm256_loadu_ps(x); }
inline fvec load(const ggml_fp16_t * x) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) x)); }
inline fvec load(const ggml_bf16_t * x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) x)), 16));
}
inline void store(float * y, fvec v) { _mm256_storeu_ps(y, v); }

// all lanes but the first `skip`
inline void store(float * y, fvec v, int skip) {
    alignas(32) float all[8];
    _mm256_store_ps(all, v);
    memcpy(y + skip, all + skip, sizeof(float) * (8 - skip));
}

inline float largest(fvec a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline float fsum(fvec a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

#endif

} // namespace ggml_dflash

#endif
