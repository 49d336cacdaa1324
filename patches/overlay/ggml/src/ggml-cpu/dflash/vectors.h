// Vectors of floats for the kernels here: DFLASH_LANES is 16 (AVX-512), 8 (AVX2) or 4 (NEON with dot products), not
// defined where there is none of these.
#pragma once

#include "ggml.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define DFLASH_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DFLASH_LANES 8
#elif defined(__ARM_NEON) && defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define DFLASH_LANES 4
#endif

#ifdef DFLASH_LANES

#include <cstdint>
#include <cstring>

#if DFLASH_LANES == 4
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace ggml_dflash {

constexpr int  LANES          = DFLASH_LANES;
constexpr bool MANY_REGISTERS = LANES != 8;  // 32, else 16

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

#elif DFLASH_LANES == 8

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

#else

using fvec = float32x4_t;

inline fvec fzero() { return vdupq_n_f32(0); }
inline fvec fset(float x) { return vdupq_n_f32(x); }
inline fvec fadd(fvec a, fvec b) { return vaddq_f32(a, b); }
inline fvec fsub(fvec a, fvec b) { return vsubq_f32(a, b); }
inline fvec fmul(fvec a, fvec b) { return vmulq_f32(a, b); }
inline fvec fma(fvec a, fvec b, fvec c) { return vfmaq_f32(c, a, b); }
inline float fsum(fvec a) { return vaddvq_f32(a); }  // (0 + 1) + (2 + 3)
inline fvec larger(fvec a, fvec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b if one is no number
inline float largest(fvec a) { return vmaxvq_f32(a); }
inline uint64_t above_mask(fvec a, fvec b) {  // bit per lane
    static const uint32_t bit[4] = { 1, 2, 4, 8 };
    return vaddvq_u32(vandq_u32(vcgtq_f32(a, b), vld1q_u32(bit)));
}
inline fvec load(const float * x) { return vld1q_f32(x); }
inline fvec load(const ggml_fp16_t * x) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x))); }
inline fvec load(const ggml_bf16_t * x) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *) x), 16));
}
inline void store(float * y, fvec v) { vst1q_f32(y, v); }

// all lanes but the first `skip`
inline void store(float * y, fvec v, int skip) {
    float all[4];
    vst1q_f32(all, v);
    memcpy(y + skip, all + skip, sizeof(float) * (4 - skip));
}

#endif

// Starts to bring what lies at `at` into the cache.
inline void fetch(const void * at) {
#if DFLASH_LANES == 4
    __builtin_prefetch(at);
#else
    _mm_prefetch((const char *) at, _MM_HINT_T0);
#endif
}

} // namespace ggml_dflash

#endif
