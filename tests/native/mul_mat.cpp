// One matrix product through ggml's CPU backend, for 1 to N columns at once; used by test_mul_mat.py.
//
//     mul_mat TYPE K ROWS N THREADS SEED SCALE LAYOUT SPECIAL
//
// LAYOUT is `file` or `repack` (the backend's interleaved weights). SPECIAL is what the first column
// has in it: `none`, one `nan`, `inf` or `-inf`, nothing but `zero`, or one `spike` of 30000.
// Prints JSON: for every number of columns the largest error relative to the row's sum of |w x| in
// double precision (x as given, not quantised; without a special column), how many results differ
// from the same column computed alone, digests of the bits (of all columns, and of all but the first),
// and how many results of the first column are finite.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

static ggml_backend_buffer_type_t repack_type() {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    auto get = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    for (auto * type = get ? get(dev) : nullptr; type && *type; type++) {
        if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) {
            return *type;
        }
    }
    return nullptr;
}

int main(int argc, char ** argv) {
    if (argc != 10) {
        fprintf(stderr, "expected 9 arguments\n");
        return 2;
    }
    const std::string name = argv[1], layout = argv[8], special = argv[9];
    const int64_t     k = atoll(argv[2]), rows = atoll(argv[3]), n = atoll(argv[4]);
    const int         threads = atoi(argv[5]);
    const float       scale   = (float) atof(argv[7]);
    ggml_type         type    = GGML_TYPE_COUNT;
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * known = ggml_type_name((ggml_type) t);
        type               = known && name == known ? (ggml_type) t : type;
    }
    if (type == GGML_TYPE_COUNT) {
        fprintf(stderr, "no type %s\n", name.c_str());
        return 2;
    }

    std::mt19937                    random(atoi(argv[6]));
    std::normal_distribution<float> normal;
    std::vector<float>              w(k * rows), x(k * n);
    for (float & v : w) {
        v = normal(random) * scale;
    }
    for (float & v : x) {
        v = normal(random) * scale;
    }
    if (special == "zero") {
        std::fill(x.begin(), x.begin() + k, 0.0f);
    } else if (special == "spike") {
        x[k / 3] = 30000;
    } else if (special != "none") {
        x[k / 3] = strtof(special.c_str(), nullptr);
    }
    std::vector<char> packed(ggml_row_size(type, k) * rows);
    ggml_quantize_chunk(type, w.data(), packed.data(), 0, rows, k, nullptr);
    if (type == GGML_TYPE_F32) {
        memcpy(packed.data(), w.data(), packed.size());
    } else {
        ggml_get_type_traits(type)->to_float(packed.data(), w.data(), k * rows);  // what the product sees
    }

    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    ggml_backend_cpu_set_n_threads(backend, threads);
    const ggml_init_params params = { ggml_tensor_overhead() * 4, nullptr, true };
    ggml_context *         weights_ctx = ggml_init(params);
    ggml_tensor *          weights     = ggml_new_tensor_2d(weights_ctx, type, k, rows);
    const auto             buffer_type =
        layout == "repack" ? repack_type() : ggml_backend_get_default_buffer_type(backend);
    if (!buffer_type) {
        printf("{\"skip\": \"this build has no CPU_REPACK buffers\"}\n");
        return 0;
    }
    ggml_backend_buffer_t weights_buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights_ctx, buffer_type);
    if (layout == "repack" && !weights->extra) {
        printf("{\"skip\": \"this CPU has no interleaved layout for %s\"}\n", name.c_str());
        return 0;
    }
    ggml_backend_buffer_set_usage(weights_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(weights, packed.data(), 0, packed.size());

    std::vector<float> alone(rows * n);
    printf("{\"columns\": [");
    for (int64_t m = 0; m <= n; m++) {  // round 0 computes every column alone
        std::vector<float> y(rows * n, NAN);
        for (int64_t c0 = 0; c0 < (m ? m : n); c0 += m ? m : 1) {
            const int64_t          width = m ? m : 1;
            const ggml_init_params graph_params = { ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true };
            ggml_context *         ctx = ggml_init(graph_params);
            ggml_tensor *          in  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, k, width);
            ggml_tensor *          out = ggml_mul_mat(ctx, weights, in);
            ggml_cgraph *          graph = ggml_new_graph(ctx);
            ggml_build_forward_expand(graph, out);
            ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
            ggml_backend_tensor_set(in, x.data() + c0 * k, 0, width * k * sizeof(float));
            if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
                return 1;
            }
            ggml_backend_tensor_get(out, y.data() + c0 * rows, 0, width * rows * sizeof(float));
            ggml_backend_buffer_free(buffer);
            ggml_free(ctx);
        }
        if (m == 0) {
            alone = y;
            continue;
        }
        double   worst     = 0;
        int64_t  different = 0;
        int64_t  finite = 0;
        uint64_t digest = 14695981039346656037ull, others = digest;
        for (int64_t c = 0; c < m; c++) {
            for (int64_t r = 0; r < rows; r++) {
                double sum = 0, size = 0;
                for (int64_t i = 0; i < k; i++) {
                    const double product = (double) w[r * k + i] * x[c * k + i];
                    sum += product, size += std::fabs(product);
                }
                const float value = y[c * rows + r];
                const double error = std::fabs(value - sum) / (size > 0 ? size : 1);
                if (c > 0 || special == "none") {
                    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
                }
                finite += c == 0 && std::isfinite(value);
                different += memcmp(&value, &alone[c * rows + r], sizeof(float)) != 0;
                uint32_t bits;
                memcpy(&bits, &value, sizeof(bits));
                digest = (digest ^ bits) * 1099511628211ull;
                others = c > 0 ? (others ^ bits) * 1099511628211ull : others;
            }
        }
        printf("%s{\"n\": %d, \"error\": %.3e, \"different\": %d, \"digest\": \"%016llx\", \"others\": \"%016llx\", "
               "\"finite\": %d}",
               m > 1 ? ", " : "", (int) m, std::isinf(worst) ? 1e30 : worst, (int) different, (unsigned long long) digest,
               (unsigned long long) others, (int) finite);
    }
    printf("]}\n");
    ggml_backend_buffer_free(weights_buffer);
    ggml_free(weights_ctx);
    ggml_backend_free(backend);
    return 0;
}
