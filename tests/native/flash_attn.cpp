// Attention of 1 to N query positions through ggml's CPU backend; used by test_flash_attn.py.
//
//     flash_attn KV_TYPE D HEADS KV_HEADS KEYS N THREADS SEED MASK
//
// MASK: `none`, `causal` (position i of N sees the keys but the last N - 1 - i), `window` (the last 70 of those), `holes` (random
// keys hidden, whole chunks among them), or `poison` (as holes, and hidden keys and values are NaN).
// Prints JSON: per number of positions the largest error against double precision, relative to the largest
// value, and how many results differ from the same position computed alone.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

struct problem {
    ggml_type type;
    int64_t d, heads, kv_heads, keys, n;
    int threads;
    std::vector<float> q, k, v; // q [n][heads][d], k and v [kv_heads][keys][d]
    std::vector<std::vector<char>> hidden; // [n][keys]
    bool has_mask;
    float scale;
};

static void put(ggml_tensor * t, const std::vector<float> & x) {
    if (t->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(t, x.data(), 0, x.size() * sizeof(float));
        return;
    }
    std::vector<ggml_fp16_t> half(x.size());
    ggml_fp32_to_fp16_row(x.data(), half.data(), x.size());
    ggml_backend_tensor_set(t, half.data(), 0, half.size() * sizeof(half[0]));
}

// rows [first, first + n) of the queries -> [n][heads][d]
static std::vector<float> attend(ggml_backend_t backend, const problem & p, int64_t first, int64_t n) {
    ggml_init_params params = { ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, p.d, n, p.heads);
    ggml_tensor * k = ggml_new_tensor_3d(ctx, p.type, p.d, p.keys, p.kv_heads);
    ggml_tensor * v = ggml_new_tensor_3d(ctx, p.type, p.d, p.keys, p.kv_heads);
    ggml_tensor * m = p.has_mask ? ggml_new_tensor_2d(ctx, GGML_TYPE_F16, p.keys, n) : nullptr;
    ggml_tensor * o = ggml_flash_attn_ext(ctx, q, k, v, m, p.scale, 0.0f, 0.0f);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, o);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);

    std::vector<float> part(n * p.heads * p.d);
    for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t i = 0; i < n; ++i) {
            memcpy(&part[(h * n + i) * p.d], &p.q[((first + i) * p.heads + h) * p.d], p.d * sizeof(float));
        }
    }
    put(q, part);
    put(k, p.k);
    put(v, p.v);
    if (m) {
        std::vector<float> mask(n * p.keys);
        for (int64_t i = 0; i < n; ++i) {
            for (int64_t j = 0; j < p.keys; ++j) {
                mask[i * p.keys + j] = p.hidden[first + i][j] ? -INFINITY : 0.0f;
            }
        }
        put(m, mask);
    }
    ggml_backend_graph_compute(backend, graph);
    std::vector<float> out(n * p.heads * p.d);
    ggml_backend_tensor_get(o, out.data(), 0, out.size() * sizeof(float));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return out;
}

int main(int argc, char ** argv) {
    if (argc != 10) {
        return 2;
    }
    problem p;
    p.type     = !strcmp(argv[1], "f32") ? GGML_TYPE_F32 : GGML_TYPE_F16;
    p.d        = atoll(argv[2]);
    p.heads    = atoll(argv[3]);
    p.kv_heads = atoll(argv[4]);
    p.keys     = atoll(argv[5]);
    p.n        = atoll(argv[6]);
    p.threads  = atoi(argv[7]);
    const std::string mask = argv[9];
    p.has_mask = mask != "none";
    p.scale    = 1.0f / std::sqrt((float) p.d);

    std::mt19937 random(atoi(argv[8]));
    std::normal_distribution<float> normal;
    auto fill = [&](std::vector<float> & x, size_t n, float scale, bool half) {
        x.resize(n);
        for (auto & y : x) {
            y = normal(random) * scale;
            y = half ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(y)) : y;
        }
    };
    const bool half = p.type == GGML_TYPE_F16;
    fill(p.q, p.n * p.heads * p.d, 2.0f, false);
    fill(p.k, p.kv_heads * p.keys * p.d, 2.0f, half);
    fill(p.v, p.kv_heads * p.keys * p.d, 1.0f, half);
    p.hidden.assign(p.n, std::vector<char>(p.keys, 0));
    for (int64_t i = 0; i < p.n && p.has_mask; ++i) {
        const int64_t last = p.keys - p.n + i; // its own key
        for (int64_t j = 0; j < p.keys; ++j) {
            char & h = p.hidden[i][j];
            if (mask == "causal" || mask == "window") {
                h = j > last || (mask == "window" && j <= last - 70);
            } else {
                h = j != p.keys / 2 && ((j / 64) % 3 == 1 || random() % 4 == 0);
            }
        }
    }
    if (mask == "poison") {
        for (int64_t j = 0; j < p.keys; ++j) {
            bool seen = false;
            for (int64_t i = 0; i < p.n; ++i) {
                seen = seen || !p.hidden[i][j];
            }
            for (int64_t h = 0; h < p.kv_heads && !seen; ++h) {
                for (int64_t x = 0; x < p.d; ++x) {
                    p.k[(h * p.keys + j) * p.d + x] = p.v[(h * p.keys + j) * p.d + x] = NAN;
                }
            }
        }
    }

    std::vector<double> exact(p.n * p.heads * p.d);
    double largest = 0.0;
    for (int64_t i = 0; i < p.n; ++i) {
        for (int64_t h = 0; h < p.heads; ++h) {
            const int64_t g = h / (p.heads / p.kv_heads);
            std::vector<double> s(p.keys, -INFINITY);
            double top = -INFINITY, total = 0.0;
            for (int64_t j = 0; j < p.keys; ++j) {
                if (p.hidden[i][j]) {
                    continue;
                }
                double dot = 0.0;
                for (int64_t x = 0; x < p.d; ++x) {
                    dot += (double) p.q[(i * p.heads + h) * p.d + x] * p.k[(g * p.keys + j) * p.d + x];
                }
                s[j] = dot * p.scale;
                top  = std::max(top, s[j]);
            }
            double * o = &exact[(i * p.heads + h) * p.d];
            for (int64_t j = 0; j < p.keys; ++j) {
                if (p.hidden[i][j]) {
                    continue;
                }
                const double w = std::exp(s[j] - top);
                total += w;
                for (int64_t x = 0; x < p.d; ++x) {
                    o[x] += w * p.v[(g * p.keys + j) * p.d + x];
                }
            }
            for (int64_t x = 0; x < p.d; ++x) {
                o[x] /= total;
                largest = std::max(largest, std::fabs(o[x]));
            }
        }
    }

    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    ggml_backend_cpu_set_n_threads(backend, p.threads);

    std::vector<std::vector<float>> alone;
    for (int64_t i = 0; i < p.n; ++i) {
        alone.push_back(attend(backend, p, i, 1));
    }
    printf("{\"positions\": [");
    for (int64_t n = 1; n <= p.n; ++n) {
        const auto out = attend(backend, p, 0, n);
        double error = 0.0;
        int64_t differ = 0;
        for (size_t x = 0; x < out.size(); ++x) {
            const double e = std::fabs(out[x] - exact[x]);
            error = !(e <= error) ? e : error; // NaN stays
            const size_t row = x / (p.heads * p.d), col = x % (p.heads * p.d);
            differ += memcmp(&out[x], &alone[row][col], sizeof(float)) != 0;
        }
        printf("%s{\"error\": %.9g, \"differ\": %lld}", n > 1 ? ", " : "", std::isfinite(error) ? error / largest : 1e30, (long long) differ);
    }
    printf("]}\n");
    ggml_backend_free(backend);
    return 0;
}
