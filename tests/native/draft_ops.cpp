// One node of ggml-dflash.h, or one top-k, through ggml's CPU backend; used by test_draft_ops.py.
//
//     draft_ops conv    CHANNELS TOKENS BLOCKS TAPS GROUP SIDE BASE-TYPE RESIDUAL STRIDE THREADS SEED SPECIAL
//     draft_ops lattice VOCABULARY WIDTH TOKENS BLOCKS DRAFTED K RANK TABLE-TYPE THREADS SEED SPECIAL OWN
//     draft_ops top_k   COLUMNS ROWS K THREADS SEED SPECIAL
//
// Prints JSON: `different`, results that are not the expected bits (conv, top_k, and what a lattice does not score),
// and for a lattice `error`, the largest error relative to the sum of the absolute terms.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include "ggml-dflash.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

std::mt19937 rng;

float normal() {
    static std::normal_distribution<float> next;
    return next(rng);
}

ggml_type type_of(const std::string & name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * known = ggml_type_name((ggml_type) t);
        if (known && name == known) {
            return (ggml_type) t;
        }
    }
    fprintf(stderr, "no type %s\n", name.c_str());
    exit(2);
}

struct Graph {
    ggml_context *        ctx;
    ggml_backend_t        backend = ggml_backend_cpu_init();
    ggml_backend_buffer_t buffer  = nullptr;

    explicit Graph(int threads) {
        ctx = ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
        ggml_backend_cpu_set_n_threads(backend, threads);
    }
    ~Graph() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_free(backend);
        ggml_free(ctx);
    }

    ggml_tensor * node(const char * name, int64_t ne0, int64_t ne1, std::vector<ggml_tensor *> src, ggml_dflash_tag tag) {
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
        auto fun = (ggml_dflash_function) ggml_backend_reg_get_proc_address(reg, name);
        if (!fun) {
            fprintf(stderr, "the CPU backend has no %s\n", name);
            exit(1);
        }
        ggml_tensor * made = ggml_custom_4d(ctx, GGML_TYPE_F32, ne0, ne1, 1, 1, src.data(), (int) src.size(), fun, GGML_N_TASKS_MAX, nullptr);
        ggml_dflash_set_tag(made, tag);
        return made;
    }

    void allocate() { buffer = ggml_backend_alloc_ctx_tensors(ctx, backend); }

    void compute(ggml_tensor * result) {
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, result);
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            exit(1);
        }
    }
};

// fills a tensor with normal numbers; returns them as the type holds them
std::vector<float> fill(ggml_tensor * t, float scale = 1.0f) {
    std::vector<float> x(ggml_nelements(t)), held(x.size());
    for (float & v : x) {
        v = scale * normal();
    }
    if (t->type == GGML_TYPE_F32) {
        memcpy(t->data, x.data(), ggml_nbytes(t));
        return x;
    }
    ggml_quantize_chunk(t->type, x.data(), t->data, 0, ggml_nelements(t) / t->ne[0], t->ne[0], nullptr);
    ggml_get_type_traits(t->type)->to_float(t->data, held.data(), (int64_t) held.size());
    return held;
}

bool same(float a, float b) { return memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b)); }

float rounded(float x) {
    volatile float kept = x;
    return kept;
}

int conv(char ** a) {
    const int64_t channels = atoll(a[0]), tokens = atoll(a[1]), blocks = atoll(a[2]), taps = atoll(a[3]), group = atoll(a[4]), side = atoll(a[5]);
    const ggml_type   type     = type_of(a[6]);
    const bool        residual = atoi(a[7]) != 0;
    const int64_t     stride   = atoll(a[8]);  // values between the rows of x, beyond its channels
    const std::string special  = a[11];
    rng.seed(atoi(a[10]));

    const int64_t n = tokens * blocks, groups = channels / group;
    Graph         g(atoi(a[9]));
    ggml_tensor * x_all   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, channels + stride, n);
    ggml_tensor * x       = ggml_view_2d(g.ctx, x_all, channels, n, x_all->nb[1], 0);
    ggml_tensor * dynamic = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, 2 * taps * groups, n);
    ggml_tensor * base    = ggml_new_tensor_3d(g.ctx, type, channels, taps, 2);
    ggml_tensor * added   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, channels, n);

    ggml_dflash_tag tag = {};
    tag.kind     = GGML_DFLASH_CONV;
    tag.n_tokens = (int32_t) tokens;
    tag.n_taps   = (int32_t) taps;
    tag.group    = (int32_t) group;
    tag.side     = (int32_t) side;
    std::vector<ggml_tensor *> src = { x, dynamic, base };
    if (residual) {
        src.push_back(added);
    }
    ggml_tensor * y = g.node("ggml_dflash_conv", channels, n, src, tag);
    g.allocate();

    std::vector<float> vx = fill(x_all), vd = fill(dynamic), vb = fill(base), va = fill(added);
    if (special != "none") {
        float * at = (float *) x->data + (channels + stride) * (n / 2) + channels / 2;
        *at = special == "nan" ? NAN : special == "inf" ? INFINITY : 1e38f;
        vx[at - (float *) x->data] = *at;
    }
    g.compute(y);

    int64_t different = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t c = 0; c < channels; c++) {
            float sum = 0;
            for (int64_t t = 0; t < std::min(taps, i % tokens + 1); t++) {
                const float weight = rounded(vb[(side * taps + t) * channels + c] + vd[i * dynamic->ne[0] + (side * taps + t) * groups + c / group]);
                const float term   = rounded(weight * vx[(i - t) * (channels + stride) + c]);
                sum = t == 0 ? term : rounded(sum + term);
            }
            sum = residual ? rounded(sum + va[i * channels + c]) : sum;
            different += !same(sum, ((const float *) y->data)[i * channels + c]);
        }
    }
    printf("{\"different\": %lld}\n", (long long) different);
    return 0;
}

int lattice(char ** a) {
    const int64_t vocab = atoll(a[0]), width = atoll(a[1]), tokens = atoll(a[2]), blocks = atoll(a[3]), drafted = atoll(a[4]), k = atoll(a[5]), rank = atoll(a[6]);
    const ggml_type   type    = type_of(a[7]);
    const std::string special = a[10];
    const int64_t own = atoll(a[11]);  // logits of so many tokens only; 0: of all
    const int64_t n   = own ? own : vocab;
    rng.seed(atoi(a[9]));

    const int64_t rows = drafted * blocks;
    Graph         g(atoi(a[8]));
    ggml_tensor * logits       = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, n, rows);
    ggml_tensor * candidates   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, k, rows);
    ggml_tensor * gate         = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, rank, rows);
    ggml_tensor * predecessors = ggml_new_tensor_2d(g.ctx, type, rank, vocab);
    ggml_tensor * successors   = ggml_new_tensor_2d(g.ctx, type, rank, vocab);
    ggml_tensor * anchors      = ggml_new_tensor_1d(g.ctx, GGML_TYPE_I32, tokens * blocks);
    ggml_tensor * names        = own ? ggml_new_tensor_1d(g.ctx, GGML_TYPE_I64, n) : nullptr;

    ggml_dflash_tag tag = {};
    tag.kind      = GGML_DFLASH_LATTICE;
    tag.n_tokens  = (int32_t) tokens;
    tag.n_drafted = (int32_t) drafted;
    ggml_tensor * y = g.node("ggml_dflash_lattice", width, tokens * blocks, { logits, candidates, gate, predecessors, successors, anchors, names }, tag);
    g.allocate();

    std::vector<float>   vl = fill(logits, 5.0f), vg = fill(gate), vp = fill(predecessors), vs = fill(successors);
    std::vector<int32_t> ids(n), vc, vt;
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<int64_t> vn(vocab);  // token of a logit
    std::iota(vn.begin(), vn.end(), 0);
    if (own) {
        std::shuffle(vn.begin(), vn.end(), rng);
        memcpy(names->data, vn.data(), ggml_nbytes(names));
    }
    for (int64_t r = 0; r < rows; r++) {
        std::shuffle(ids.begin(), ids.end(), rng);
        vc.insert(vc.end(), ids.begin(), ids.begin() + k);
    }
    for (int64_t i = 0; i < tokens * blocks; i++) {
        vt.push_back((int32_t) (rng() % vocab));
    }
    memcpy(candidates->data, vc.data(), ggml_nbytes(candidates));
    memcpy(anchors->data, vt.data(), ggml_nbytes(anchors));
    const int64_t at = vc[(rows - 1) * k];  // the last row's first candidate
    if (special != "none") {
        const float value = special == "nan" ? NAN : special == "inf" ? INFINITY : -INFINITY;
        ((float *) logits->data)[(rows - 1) * n + at] = vl[(rows - 1) * n + at] = value;
    }
    memset(y->data, 0x7f, ggml_nbytes(y));
    g.compute(y);

    int64_t different = 0;
    double  error     = 0;
    for (int64_t i = 0; i < tokens * blocks; i++) {
        const float * out = (const float *) y->data + i * width;
        const int64_t b = i / tokens, p = i % tokens;
        const bool    scored = p >= 1 && p <= drafted;
        for (int64_t c = scored ? k + k * k : 0; c < width; c++) {
            different += !same(out[c], 0.0f);
        }
        const int64_t r = b * drafted + p - 1;
        for (int64_t c = 0; scored && c < k; c++) {
            const int64_t id = vn[vc[r * k + c]];
            different += out[c] != (float) id;
            for (int64_t j = 0; j < k; j++) {
                const int64_t before = p == 1 ? vt[b * tokens] : vn[vc[(r - 1) * k + j]];
                double        sum = vl[r * n + vc[r * k + c]], size = std::fabs(sum);
                for (int64_t q = 0; q < rank; q++) {
                    const double term = (double) vp[before * rank + q] * vg[r * rank + q] * vs[id * rank + q];
                    sum += term;
                    size += std::fabs(term);
                }
                const float got = out[k + j * k + c];
                if (std::isfinite(sum)) {
                    error = std::max(error, std::isfinite(got) ? std::fabs(got - sum) / size : INFINITY);
                } else {
                    different += !same(got, (float) sum);
                }
            }
        }
    }
    printf("{\"different\": %lld, \"error\": %.9g}\n", (long long) different, std::isfinite(error) ? error : 1e30);
    return 0;
}

int top_k(char ** a) {
    const int64_t     columns = atoll(a[0]), rows = atoll(a[1]), k = atoll(a[2]);
    const std::string special = a[5];
    rng.seed(atoi(a[4]));

    Graph         g(atoi(a[3]));
    ggml_tensor * x = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, columns, rows);
    ggml_tensor * y = ggml_top_k(g.ctx, x, (int) k);
    g.allocate();
    fill(x);
    float * values = (float *) x->data;
    for (int64_t i = 0; i < rows * columns; i++) {
        values[i] = special == "equal"      ? (float) (rng() % 3)
                  : special == "zeros"      ? (rng() % 2 ? 0.0f : -0.0f)
                  : special == "hidden"     ? (rng() % columns < (uint64_t) k / 2 ? values[i] : -INFINITY)
                  : special == "nan"        ? (rng() % 2 ? NAN : values[i])
                  : special == "all nan"    ? NAN
                  : special == "inf"        ? (rng() % columns < 2 ? INFINITY : values[i])
                  : special == "ascending"  ? (float) i
                  : special == "descending" ? (float) -i
                                            : values[i];
    }
    g.compute(y);

    int64_t different = 0;
    for (int64_t r = 0; r < rows; r++) {
        std::vector<int32_t> ids(columns);
        std::iota(ids.begin(), ids.end(), 0);
        const auto value = [&](int32_t id) {
            const float v = values[r * columns + id];
            return std::isnan(v) ? -INFINITY : v;
        };
        std::stable_sort(ids.begin(), ids.end(), [&](int32_t l, int32_t m) { return value(l) > value(m); });
        for (int64_t i = 0; i < k; i++) {
            different += ((const int32_t *) y->data)[r * k + i] != ids[i];
        }
    }
    printf("{\"different\": %lld}\n", (long long) different);
    return 0;
}

}  // namespace

int main(int argc, char ** argv) {
    const std::string kind = argc > 1 ? argv[1] : "";
    if (kind == "conv" && argc == 14) {
        return conv(argv + 2);
    }
    if (kind == "lattice" && argc == 14) {
        return lattice(argv + 2);
    }
    if (kind == "top_k" && argc == 8) {
        return top_k(argv + 2);
    }
    fprintf(stderr, "expected conv, lattice or top_k and its arguments\n");
    return 2;
}
