// Softmax(scale Q K^T + mask) V for few rows of Q, in one pass over the keys (online softmax: Milakov and
// Gimelshein, arXiv 1805.02867; in blocks: Dao et al., arXiv 2205.14135).
//
// A row's keys come in chunks of CHUNK at fixed places. Per chunk: all scores, their largest, the weights
// exp(score - largest so far), then the weighted values are added key by key. A chunk that the mask hides
// from a row is left out, which changes no bit: its weights would be exactly 0 and every factor exactly 1.
// Keys and values are widened to F32, which is more precise than the base's F16 sums.

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // both raised inside the compiler's own intrinsics
#endif

#include "flash-attn.h"

#include "mul-mat.h"
#include "vectors.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef DFLASH_LANES

namespace {

using namespace ggml_dflash;

constexpr int64_t CHUNK    = 64;  // keys
constexpr int64_t MAX_ROWS = GGML_DFLASH_MUL_MAT_MAX_COLUMNS;  // query positions, as many as the products take

#if DFLASH_LANES == 16

inline fvec nearest(fvec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// x, and minus infinity where the mask m is that, whatever x
inline fvec hide(fvec x, fvec m) {
    const fvec least = fset(-INFINITY);
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(m, least, _CMP_EQ_OQ), least);
}

// y * 2^n, and 0 where x is too small to count
inline fvec finish(fvec x, fvec y, fvec n, fvec least) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ);  // NaN stays NaN
    return _mm512_maskz_scalef_ps(keep, y, n);
}

#elif DFLASH_LANES == 8

inline fvec nearest(fvec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline fvec hide(fvec x, fvec m) {
    const fvec least = fset(-INFINITY);
    return _mm256_blendv_ps(x, least, _mm256_cmp_ps(m, least, _CMP_EQ_OQ));
}

inline fvec finish(fvec x, fvec y, fvec n, fvec least) {
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(power)), _mm256_cmp_ps(x, least, _CMP_NLT_UQ));
}

#else

inline fvec nearest(fvec x) { return vrndnq_f32(x); }

inline fvec hide(fvec x, fvec m) {
    const fvec least = fset(-INFINITY);
    return vbslq_f32(vceqq_f32(m, least), least, x);
}

inline fvec finish(fvec x, fvec y, fvec n, fvec least) {
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    const fvec      value = fmul(y, vreinterpretq_f32_s32(power));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, least)));  // NaN stays NaN
}

#endif

// exp(x) for x <= 0, relative error below 3e-7; 0 below -87. 2^n exp(r) with |r| <= ln(2) / 2 and the series of exp(r).
inline fvec exponential(fvec x) {
    const fvec n = nearest(fmul(x, fset(1.44269504f)));
    fvec r = fma(n, fset(-0.693359375f), x);  // ln(2) in two parts
    r = fma(n, fset(2.12194440e-4f), r);
    fvec y = fset(1.0f / 720);
    y = fma(y, r, fset(1.0f / 120));
    y = fma(y, r, fset(1.0f / 24));
    y = fma(y, r, fset(1.0f / 6));
    y = fma(y, r, fset(0.5f));
    y = fma(y, r, fset(1.0f));
    y = fma(y, r, fset(1.0f));
    return finish(x, y, n, fset(-87.0f));
}

inline float exponential(float x) {
    float out[LANES];
    store(out, exponential(fset(x)));
    return out[0];
}

// one query row of a tile
struct query {
    const float       * q;
    const ggml_fp16_t * mask;  // null: all keys are seen
    float             * out;
    float top = -INFINITY;
    float total   = 0.0f;
    bool  seen    = false;     // the chunk at hand
    float weight[CHUNK];
};

// What the rows of a tile see of the keys [first, first + n). T rows, keys of NK vectors, values of NV.
template <typename KV, int T, int NK, int NV>
void chunk(query * rows, float (*acc)[NV * LANES], const char * k, size_t k_step, const char * v, size_t v_step, int64_t first, int64_t n,
           float scale) {
    // vectors of a value at a time: with four lanes they do not all fit the registers
    constexpr int PART = LANES > 4 ? NV : T > 1 ? 4 : NV <= 24 ? NV : 16;
    static_assert(NV % PART == 0);

    bool any = false;
    for (int t = 0; t < T; ++t) {
        query & row = rows[t];
        row.seen = row.mask == nullptr;
        for (int64_t j = 0; j < n && !row.seen; ++j) {
            row.seen = row.mask[first + j] != 0xfc00;  // -inf
        }
        any = any || row.seen;
    }
    if (!any) {
        return;
    }

    for (int64_t j = 0; j < n; ++j) {
        const KV * key = (const KV *) (k + (first + j) * k_step);
        fvec s[T];
        for (int t = 0; t < T; ++t) {
            s[t] = fzero();
        }
        for (int i = 0; i < NK; ++i) {
            const fvec x = load(key + i * LANES);
            for (int t = 0; t < T; ++t) {
                s[t] = fma(x, load(rows[t].q + i * LANES), s[t]);
            }
        }
        for (int t = 0; t < T; ++t) {
            rows[t].weight[j] = fsum(s[t]);
        }
    }

    for (int t = 0; t < T; ++t) {
        query & row = rows[t];
        if (!row.seen) {
            std::fill(row.weight, row.weight + n, 0.0f);
            continue;
        }
        ggml_fp16_t mask[CHUNK] = {};
        if (row.mask) {
            memcpy(mask, row.mask + first, n * sizeof(mask[0]));
        }
        std::fill(mask + n, mask + CHUNK, (ggml_fp16_t) 0xfc00);
        std::fill(row.weight + n, row.weight + CHUNK, 0.0f);

        fvec most = fset(row.top);
        for (int64_t j = 0; j < CHUNK; j += LANES) {
            const fvec m = load(mask + j);
            // hidden keys may hold anything, NaN too
            const fvec w = hide(fma(load(row.weight + j), fset(scale), m), m);
            store(row.weight + j, w);
            most = larger(w, most);
        }
        const float top = largest(most);
        if (top == -INFINITY) {
            row.seen = false;
            std::fill(row.weight, row.weight + n, 0.0f);
            continue;
        }
        if (top > row.top) {
            const float factor = row.top == -INFINITY ? 0.0f : exponential(row.top - top);
            row.total *= factor;
            for (int i = 0; i < NV; ++i) {
                store(acc[t] + i * LANES, fmul(load(acc[t] + i * LANES), fset(factor)));
            }
            row.top = top;
        }
        fvec sums = fzero();
        for (int64_t j = 0; j < CHUNK; j += LANES) {
            const fvec w = exponential(fsub(load(row.weight + j), fset(top)));
            store(row.weight + j, w);
            sums = fma(w, fset(1.0f), sums);
        }
        row.total += fsum(sums);
    }

    for (int from = 0; from < NV; from += PART) {
        fvec o[T][PART];
        for (int t = 0; t < T; ++t) {
            for (int i = 0; i < PART; ++i) {
                o[t][i] = load(acc[t] + (from + i) * LANES);
            }
        }
        for (int64_t j = 0; j < n; ++j) {
            const KV * value = (const KV *) (v + (first + j) * v_step);
            fvec x[PART];
            for (int i = 0; i < PART; ++i) {
                x[i] = load(value + (from + i) * LANES);
            }
            for (int t = 0; t < T; ++t) {
                const float w = rows[t].weight[j];
                if (w != 0.0f) {  // a hidden value must not count, whatever it is
                    for (int i = 0; i < PART; ++i) {
                        o[t][i] = fma(x[i], fset(w), o[t][i]);
                    }
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            if (rows[t].seen) {
                for (int i = 0; i < PART; ++i) {
                    store(acc[t] + (from + i) * LANES, o[t][i]);
                }
            }
        }
    }
}

template <typename KV, int T, int NK, int NV>
void tile(query * rows, const char * k, size_t k_step, const char * v, size_t v_step, int64_t n_keys, float scale) {
    float acc[T][NV * LANES] = {};
    for (int64_t first = 0; first < n_keys; first += CHUNK) {
        chunk<KV, T, NK, NV>(rows, acc, k, k_step, v, v_step, first, std::min(CHUNK, n_keys - first), scale);
    }
    for (int t = 0; t < T; ++t) {
        const float norm = rows[t].total > 0.0f ? 1.0f / rows[t].total : rows[t].total == 0.0f ? 0.0f : rows[t].total;
        for (int i = 0; i < NV * LANES; ++i) {
            rows[t].out[i] = acc[t][i] * norm;
        }
    }
}

struct job {
    const ggml_tensor * q, * k, * v, * mask;
    ggml_tensor * dst;
    float   scale;
    int64_t begin, end;  // query rows, ordered by sequence, head and position
};

template <typename KV, int ND>
void work(const job & w) {
    // as many rows as leave their sums in registers
    constexpr int T = LANES == 16 ? (ND <= 4 ? 4 : ND <= 8 ? 2 : 1) : LANES == 8 ? (ND <= 4 ? 2 : 1) : 4;

    const int64_t n_pos = w.q->ne[1], n_head = w.q->ne[2];
    const int64_t per_k = n_head / w.k->ne[2], per_v = n_head / w.v->ne[2];
    const int64_t seq_k = w.q->ne[3] / w.k->ne[3], seq_v = w.q->ne[3] / w.v->ne[3];

    query rows[T];
    for (int64_t r = w.begin; r < w.end;) {
        const int64_t head = r / n_pos % n_head, seq = r / (n_pos * n_head);
        int n = 0;
        for (; n < T && r + n < w.end; ++n) {
            const int64_t pos = (r + n) % n_pos, h = (r + n) / n_pos % n_head, s = (r + n) / (n_pos * n_head);
            if (s != seq || h / per_k != head / per_k || h / per_v != head / per_v) {
                break;
            }
            rows[n]      = query();
            rows[n].q    = (const float *) ((const char *) w.q->data + pos * w.q->nb[1] + h * w.q->nb[2] + s * w.q->nb[3]);
            rows[n].mask = w.mask ? (const ggml_fp16_t *) ((const char *) w.mask->data + pos * w.mask->nb[1] + (h % w.mask->ne[2]) * w.mask->nb[2] + (s % w.mask->ne[3]) * w.mask->nb[3])
                                  : nullptr;
            rows[n].out  = (float *) ((char *) w.dst->data + h * w.dst->nb[1] + pos * w.dst->nb[2] + s * w.dst->nb[3]);
        }
        const char * k = (const char *) w.k->data + (head / per_k) * w.k->nb[2] + (seq / seq_k) * w.k->nb[3];
        const char * v = (const char *) w.v->data + (head / per_v) * w.v->nb[2] + (seq / seq_v) * w.v->nb[3];
        const int64_t n_keys = w.k->ne[1];
        if (n == T) {
            tile<KV, T, ND, ND>(rows, k, w.k->nb[1], v, w.v->nb[1], n_keys, w.scale);
        } else {
            for (int t = 0; t < n; ++t) {
                tile<KV, 1, ND, ND>(rows + t, k, w.k->nb[1], v, w.v->nb[1], n_keys, w.scale);
            }
        }
        r += n;
    }
}

template <typename KV>
bool dispatch(const job & w, int64_t d) {
    switch (d) {
        case 32:  work<KV, 32  / LANES>(w); return true;
        case 64:  work<KV, 64  / LANES>(w); return true;
        case 80:  work<KV, 80  / LANES>(w); return true;
        case 96:  work<KV, 96  / LANES>(w); return true;
        case 128: work<KV, 128 / LANES>(w); return true;
        case 192: work<KV, 192 / LANES>(w); return true;
        case 256: work<KV, 256 / LANES>(w); return true;
        default:  return false;
    }
}

} // namespace

bool ggml_dflash_flash_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];

    float op[3];
    memcpy(op, dst->op_params, sizeof(op));  // scale, ALiBi, soft cap

    if (!ggml_dflash_mul_mat_available() || params->use_ref || op[1] != 0.0f || op[2] != 0.0f || dst->src[4] != nullptr) {
        return false;
    }
    if (q->type != GGML_TYPE_F32 || k->type != v->type || (k->type != GGML_TYPE_F16 && k->type != GGML_TYPE_F32) ||
        (mask && mask->type != GGML_TYPE_F16) || dst->type != GGML_TYPE_F32) {
        return false;
    }
    const size_t size = ggml_type_size(k->type);
    if (q->ne[1] > MAX_ROWS || q->ne[0] != k->ne[0] || q->ne[0] != v->ne[0] || k->ne[1] != v->ne[1] || q->nb[0] != sizeof(float) ||
        k->nb[0] != size || v->nb[0] != size || dst->nb[0] != sizeof(float) || (mask && mask->nb[0] != sizeof(ggml_fp16_t)) ||
        q->ne[2] % k->ne[2] != 0 || q->ne[2] % v->ne[2] != 0 || q->ne[3] % k->ne[3] != 0 || q->ne[3] % v->ne[3] != 0) {
        return false;
    }

    const int64_t n_rows = q->ne[1] * q->ne[2] * q->ne[3];
    job w = { q, k, v, mask, dst, op[0], n_rows * params->ith / params->nth, n_rows * (params->ith + 1) / params->nth };
    return k->type == GGML_TYPE_F16 ? dispatch<ggml_fp16_t>(w, q->ne[0]) : dispatch<float>(w, q->ne[0]);
}

#else

bool ggml_dflash_flash_attn(const ggml_compute_params *, ggml_tensor *) { return false; }

#endif
