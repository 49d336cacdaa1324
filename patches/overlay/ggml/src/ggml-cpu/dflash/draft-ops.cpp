// CPU kernels of ggml-dflash.h, and top-k.
//
// At the shapes of a published draft (hidden 5120, block 8, vocabulary 248320, k 16, rank 256) a convolution
// moves 0.8 MB and takes 41,000 multiply-adds per tap, a lattice 65,000 per position, and a top-k reads its
// row once: 7 MB of logits, which the output head has just written.

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // both raised inside the compiler's own intrinsics
#endif

#include "draft-ops.h"

#include "vectors.h"

#include "ggml-cpu-impl.h"
#include "ggml-dflash.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

#ifdef DFLASH_LANES
using namespace ggml_dflash;
#endif

// Keeps the compiler from turning a product and a sum into one operation with one rounding.
inline float rounded(float x) {
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
    asm("" : "+x"(x));
#elif defined(__GNUC__) && defined(__aarch64__)
    asm("" : "+w"(x));
#else
    volatile float kept = x;
    x = kept;
#endif
    return x;
}
#ifdef DFLASH_LANES
inline fvec rounded(fvec x) {
#if DFLASH_LANES == 4
    asm("" : "+w"(x));
#elif defined(__GNUC__)
    asm("" : "+v"(x));
#endif
    return x;
}
#endif

// ---- convolution --------------------------------------------------------------------------------

inline float to_float(float x) { return x; }
inline float to_float(ggml_fp16_t x) { return ggml_fp16_to_fp32(x); }
inline float to_float(ggml_bf16_t x) { return ggml_bf16_to_fp32(x); }

template <typename T> struct Convolution {
    const ggml_tensor * x;
    const ggml_tensor * dynamic;
    const ggml_tensor * residual;
    const T *           base;  // of the side: [taps][channels]
    ggml_tensor *       dst;
    ggml_dflash_tag     tag;

    static const float * row(const ggml_tensor * t, int64_t i) { return (const float *) ((const char *) t->data + i * t->nb[1]); }

    // Token i's values of the channels [first, last) of one group: coefficients are the same for all.
    void channels(int64_t i, int64_t group, int64_t first, int64_t last) const {
        const int64_t n_channels = x->ne[0];
        const int64_t n_groups   = n_channels / tag.group;
        const int     n_taps     = (int) std::min<int64_t>(tag.n_taps, i % tag.n_tokens + 1);
        const float * added      = residual ? row(residual, i) : nullptr;
        const float * d          = row(dynamic, i) + (int64_t) tag.side * tag.n_taps * n_groups + group;
        float *       y          = (float *) ((char *) dst->data + i * dst->nb[1]);

        int64_t c = first;
#ifdef DFLASH_LANES
        for (; c + LANES <= last; c += LANES) {
            fvec sum = fmul(fadd(load(base + c), fset(d[0])), load(row(x, i) + c));
            for (int t = 1; t < n_taps; t++) {
                const fvec weight = fadd(load(base + t * n_channels + c), fset(d[t * n_groups]));
                sum = fadd(rounded(sum), rounded(fmul(weight, load(row(x, i - t) + c))));
            }
            store(y + c, added ? fadd(rounded(sum), load(added + c)) : sum);
        }
#endif
        for (; c < last; c++) {
            float sum = rounded((to_float(base[c]) + d[0]) * row(x, i)[c]);
            for (int t = 1; t < n_taps; t++) {
                sum += rounded((to_float(base[t * n_channels + c]) + d[t * n_groups]) * row(x, i - t)[c]);
            }
            y[c] = added ? sum + added[c] : sum;
        }
    }

    void run(int ith, int nth) const {
        const int64_t n_groups = x->ne[0] / tag.group;
        for (int64_t i = 0; i < x->ne[1]; i++) {
            for (int64_t g = n_groups * ith / nth; g < n_groups * (ith + 1) / nth; g++) {
                channels(i, g, g * tag.group, (g + 1) * tag.group);
            }
        }
    }
};

template <typename T> void convolve(ggml_tensor * dst, int ith, int nth) {
    const ggml_tensor *   base = dst->src[2];
    const ggml_dflash_tag tag  = ggml_dflash_get_tag(dst);
    Convolution<T>{ dst->src[0], dst->src[1], dst->src[3], (const T *) base->data + tag.side * base->ne[0] * base->ne[1], dst, tag }
        .run(ith, nth);
}

// ---- lattice ------------------------------------------------------------------------------------

// One row of a codebook.
void read_row(const ggml_tensor * table, int64_t id, float * out) {
    const char * at = (const char *) table->data + id * table->nb[1];
    if (table->type == GGML_TYPE_F32) {
        memcpy(out, at, sizeof(float) * table->ne[0]);
    } else {
        ggml_get_type_traits(table->type)->to_float(at, out, table->ne[0]);
    }
}

inline float dot(const float * a, const float * b, int64_t n) {
    int64_t i = 0;
    float   sum = 0;
#ifdef DFLASH_LANES
    fvec lanes[2] = { fzero(), fzero() };
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        lanes[0] = fma(load(a + i), load(b + i), lanes[0]);
        lanes[1] = fma(load(a + i + LANES), load(b + i + LANES), lanes[1]);
    }
    sum = fsum(fadd(lanes[0], lanes[1]));
#endif
    for (; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

// Row r of the candidates: its scores after every candidate of the row before it in its block.
void score_row(ggml_tensor * dst, const ggml_dflash_tag & tag, int64_t r, std::vector<float> & room) {
    const ggml_tensor * logits       = dst->src[0];
    const ggml_tensor * candidates   = dst->src[1];
    const ggml_tensor * gate         = dst->src[2];
    const ggml_tensor * predecessors = dst->src[3];
    const ggml_tensor * successors   = dst->src[4];
    const ggml_tensor * tokens       = dst->src[5];
    const ggml_tensor * names        = dst->src[6];

    const int64_t k = candidates->ne[0], rank = gate->ne[0];
    const int64_t block = r / tag.n_drafted, p = r % tag.n_drafted + 1;

    const auto ids_of = [&](int64_t row) { return (const int32_t *) ((const char *) candidates->data + row * candidates->nb[1]); };
    const auto      token  = [&](int32_t id) { return names ? ((const int64_t *) names->data)[id] : (int64_t) id; };
    const int32_t * ids    = ids_of(r);
    const float *   g      = (const float *) ((const char *) gate->data + r * gate->nb[1]);
    const float *   unary  = (const float *) ((const char *) logits->data + r * logits->nb[1]);
    float *         out    = (float *) ((char *) dst->data + (block * tag.n_tokens + p) * dst->nb[1]);
    float *         scores = out + k;

    room.resize((k + 1) * rank);
    float * before = room.data() + k * rank;
    for (int64_t c = 0; c < k; c++) {
        out[c] = (float) token(ids[c]);
        read_row(successors, token(ids[c]), room.data() + c * rank);
    }
    // after the anchor all rows are the same
    const int64_t n_before = p == 1 ? 1 : k;
    for (int64_t j = 0; j < n_before; j++) {
        const int64_t id = p == 1 ? *(const int32_t *) ((const char *) tokens->data + block * tag.n_tokens * tokens->nb[0]) : token(ids_of(r - 1)[j]);
        read_row(predecessors, id, before);
        for (int64_t i = 0; i < rank; i++) {
            before[i] *= g[i];
        }
        for (int64_t c = 0; c < k; c++) {
            scores[j * k + c] = unary[ids[c]] + dot(before, room.data() + c * rank, rank);
        }
    }
    for (int64_t j = n_before; j < k; j++) {
        memcpy(scores + j * k, scores, sizeof(float) * k);
    }
}

// ---- top-k --------------------------------------------------------------------------------------

struct Candidate {
    float   value;
    int32_t id;
};

// The first of x[i..n) above the limit; n if there is none.
inline int64_t find_above(const float * x, int64_t i, int64_t n, float limit) {
#ifdef DFLASH_LANES
    const fvec bound = fset(limit);
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        const uint64_t above = above_mask(load(x + i), bound) | above_mask(load(x + i + LANES), bound) << LANES |
                               above_mask(load(x + i + 2 * LANES), bound) << (2 * LANES) |
                               above_mask(load(x + i + 3 * LANES), bound) << (3 * LANES);
        if (above) {
            return i + __builtin_ctzll(above);
        }
    }
#endif
    while (i < n && !(x[i] > limit)) {
        i++;
    }
    return i;
}

// Puts an element whose id is above all others' into a list that is sorted by descending value.
inline void insert(Candidate * list, int n, Candidate added) {
    int at = n;
    for (; at > 0 && list[at - 1].value < added.value; at--) {
        list[at] = list[at - 1];
    }
    list[at] = added;
}

// The k best of x[first..last) or all of them; returns how many.
int best_of(const float * x, int64_t first, int64_t last, int k, Candidate * list) {
    int n = 0;
    for (; n < k && first < last; n++, first++) {
        insert(list, n, { std::isnan(x[first]) ? -INFINITY : x[first], (int32_t) first });
    }
    // an equal value with a higher id is no better
    for (int64_t i = first; n == k && (i = find_above(x, i, last, list[k - 1].value)) < last; i++) {
        insert(list, k - 1, { x[i], (int32_t) i });
    }
    return n;
}

} // namespace

void ggml_dflash_conv(ggml_tensor * dst, int ith, int nth, void *) {
    switch (dst->src[2]->type) {
        case GGML_TYPE_F32:  convolve<float>      (dst, ith, nth); break;
        case GGML_TYPE_F16:  convolve<ggml_fp16_t>(dst, ith, nth); break;
        case GGML_TYPE_BF16: convolve<ggml_bf16_t>(dst, ith, nth); break;
        default:             GGML_ABORT("base kernels of type %s", ggml_type_name(dst->src[2]->type));
    }
}

void ggml_dflash_lattice(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_dflash_tag tag = ggml_dflash_get_tag(dst);
    const int64_t         k   = dst->src[1]->ne[0];

    static thread_local std::vector<float> room;
    for (int64_t i = ith; i < dst->ne[1]; i += nth) {
        const int64_t block = i / tag.n_tokens, p = i % tag.n_tokens;
        const int64_t used  = p >= 1 && p <= tag.n_drafted ? k + k * k : 0;
        if (used > 0) {
            score_row(dst, tag, block * tag.n_drafted + p - 1, room);
        }
        memset((char *) dst->data + i * dst->nb[1] + used * sizeof(float), 0, (dst->ne[0] - used) * sizeof(float));
    }
}

void * ggml_dflash_proc_address(const char * name) {
    return strcmp(name, "ggml_dflash_conv") == 0 ? (void *) ggml_dflash_conv
         : strcmp(name, "ggml_dflash_lattice") == 0 ? (void *) ggml_dflash_lattice : nullptr;
}

bool ggml_dflash_top_k(const ggml_compute_params * params, ggml_tensor * dst) {
    static const bool on = !ggml_dflash_draft_ops_is("0");
    const ggml_tensor * src    = dst->src[0];
    const int64_t       n_rows = ggml_nrows(src), n = src->ne[0];
    const int           k      = (int) dst->ne[0];
    const int           ith = params->ith, nth = params->nth;

    if (!on || params->use_ref || src->type != GGML_TYPE_F32 || k > GGML_DFLASH_MAX_TOP_K || src->nb[0] != sizeof(float) || !ggml_is_contiguous_1(src)) {
        return false;
    }
    const auto row_of = [&](int64_t r) { return (const float *) ((const char *) src->data + r * src->nb[1]); };
    const auto write  = [&](int64_t r, const Candidate * list) {
        int32_t * ids = (int32_t *) ((char *) dst->data + r * dst->nb[1]);
        for (int i = 0; i < k; i++) {
            ids[i] = list[i].id;
        }
    };
    Candidate list[GGML_DFLASH_MAX_TOP_K];

    if (params->wsize < (size_t) (n_rows * nth * k) * sizeof(Candidate)) {  // rows so short that nothing is worth sharing
        for (int64_t r = ith; r < n_rows; r += nth) {
            best_of(row_of(r), 0, n, k, list);
            write(r, list);
        }
        return true;
    }

    // every thread takes the same part of every row, in order of ids
    Candidate * const lists = (Candidate *) params->wdata;
    const auto part_of = [&](int64_t part) { return n * part / nth; };
    for (int64_t r = 0; r < n_rows; r++) {
        best_of(row_of(r), part_of(ith), part_of(ith + 1), k, lists + (r * nth + ith) * k);
    }
    ggml_barrier(params->threadpool);

    for (int64_t r = ith; r < n_rows; r += nth) {
        const Candidate * parts = lists + r * nth * k;
        int               found = 0;
        for (int part = 0; part < nth; part++) {
            const int len = (int) std::min<int64_t>(k, part_of(part + 1) - part_of(part));
            for (int i = 0; i < len; i++) {
                const Candidate & next = parts[part * k + i];
                if (found < k) {
                    insert(list, found++, next);
                } else if (next.value > list[k - 1].value) {
                    insert(list, k - 1, next);
                } else {
                    break;
                }
            }
        }
        write(r, list);
    }
    return true;
}
