// The nodes of ggml-dflash.h and ggml_top_k through ggml's backends; used by test_cuda_ops.py.
//
//     cuda_ops BACKEND OP SEED CASES   OP: conv, lattice, top_k, refused (nodes that no device may take); prints JSON:
//                                      cases, wrong values, largest part of the bound
//     cuda_ops BACKEND time N_BLOCKS   microseconds per node at the published draft's shapes, as JSON
//
// BACKEND is a device's name as ggml gives it (CUDA0, CPU). On the CPU the nodes run the library's functions, or where it
// has none the plain ones below. Compiled with DFLASH_EMULATED, EMULATED is ggml-cuda/dflash.cu itself in the emulation.
// Exit code 3: no such device.

#ifdef DFLASH_EMULATED
#include "dflash.cu"
#endif

#include "cuda_cases.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-dflash.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

namespace {

// ---- plain functions for the CPU ---------------------------------------------------------------------------------

float value_of(const ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2 = 0) {
    const char * p = (const char *) t->data + i1 * t->nb[1] + i2 * t->nb[2];
    if (t->type == GGML_TYPE_F32) {
        return ((const float *) p)[i0];
    }
    std::vector<float> row(t->ne[0]);
    ggml_get_type_traits(t->type)->to_float(p, row.data(), t->ne[0]);
    return row[i0];
}

void plain_conv(ggml_tensor * dst, int ith, int, void *) {
    const ggml_dflash_tag tag = ggml_dflash_get_tag(dst);
    const int64_t G = dst->ne[0] / tag.group;
    for (int64_t i = 0; i < dst->ne[1] && ith == 0; ++i) {
        for (int64_t c = 0; c < dst->ne[0]; ++c) {
            float sum = 0.0f;
            for (int t = 0; t < tag.n_taps && t <= i % tag.n_tokens; ++t) {
                const float dynamic     = value_of(dst->src[1], (tag.side * tag.n_taps + t) * G + c / tag.group, i);
                const float coefficient = value_of(dst->src[2], c, t, tag.side) + dynamic;
                const float term        = coefficient * value_of(dst->src[0], c, i - t);
                sum = t == 0 ? term : sum + term;
            }
            ((float *) dst->data)[i * dst->ne[0] + c] = dst->src[3] ? value_of(dst->src[3], c, i) + sum : sum;
        }
    }
}

void plain_lattice(ggml_tensor * dst, int ith, int, void *) {
    const ggml_dflash_tag tag = ggml_dflash_get_tag(dst);
    const int64_t k    = dst->src[1]->ne[0];
    const int64_t rank = dst->src[2]->ne[0];
    const auto column  = [&](int64_t c, int64_t r) {
        return *(const int32_t *) ((const char *) dst->src[1]->data + r * dst->src[1]->nb[1] + c * sizeof(int32_t));
    };
    const auto id_of   = [&](int64_t c, int64_t r) {
        return dst->src[6] ? (int32_t) ((const int64_t *) dst->src[6]->data)[column(c, r)] : column(c, r);
    };
    std::vector<float> before(rank), after(rank);
    const auto row_of = [&](const ggml_tensor * t, int64_t id, std::vector<float> & out) {
        for (int64_t q = 0; q < rank; ++q) {
            out[q] = value_of(t, q, id);
        }
    };
    for (int64_t t = 0; t < dst->ne[1] && ith == 0; ++t) {
        float * row = (float *) dst->data + t * dst->ne[0];
        std::fill(row, row + dst->ne[0], 0.0f);
        const int64_t p = t % tag.n_tokens;
        const int64_t r = t / tag.n_tokens * tag.n_drafted + p - 1;
        for (int64_t j = 0; j < k && p >= 1 && p <= tag.n_drafted; ++j) {
            row_of(dst->src[3], p == 1 ? ((const int32_t *) dst->src[5]->data)[t - 1] : id_of(j, r - 1), before);
            for (int64_t c = 0; c < k; ++c) {
                const int32_t id = id_of(c, r);
                row_of(dst->src[4], id, after);
                double sum = value_of(dst->src[0], column(c, r), r);
                for (int64_t q = 0; q < rank; ++q) {
                    sum += (double) before[q] * value_of(dst->src[2], q, r) * after[q];
                }
                row[c]             = (float) id;
                row[k + j * k + c] = (float) sum;
            }
        }
    }
}

// ---- graphs ------------------------------------------------------------------------------------------------------

struct machine {
    ggml_backend_dev_t device;
    ggml_backend_t     backend;
    ggml_custom_op_t   conv;
    ggml_custom_op_t   lattice;
    bool               emulated;

    bool supports(const ggml_tensor * node) const {
#ifdef DFLASH_EMULATED
        if (emulated) {
            return node->op == GGML_OP_TOP_K || ggml_cuda_dflash_supported(node);
        }
#endif
        return ggml_backend_dev_supports_op(device, node);
    }

    void compute(ggml_cgraph * nodes, const std::vector<ggml_tensor *> & results) const {
#ifdef DFLASH_EMULATED
        if (emulated) {
            static ggml_backend_cuda_context context;
            context.order = (context.order + 1) % 5;
            for (ggml_tensor * t : results) {
                if (t->op != GGML_OP_TOP_K) {
                    ggml_cuda_dflash(context, t);
                } else if (!ggml_cuda_dflash_top_k(context, (const float *) t->src[0]->data, (int32_t *) t->data,
                                                   t->src[0]->ne[0], ggml_nrows(t), t->ne[0])) {
                    fprintf(stderr, "a top-k was left to the base\n");
                }
            }
            return;
        }
#endif
        (void) results;
        ggml_backend_graph_compute(backend, nodes);
    }
};

// A graph, its inputs and what to put there.
struct graph {
    ggml_context                                    * ctx    = nullptr;
    ggml_backend_buffer_t                             buffer = nullptr;
    ggml_cgraph                                     * nodes  = nullptr;
    std::vector<std::function<void()>>                inputs;
    std::vector<ggml_tensor *>                        results;

    graph() {
        ctx   = ggml_init({ ggml_tensor_overhead() * 512 + ggml_graph_overhead(), nullptr, true });
        nodes = ggml_new_graph(ctx);
    }

    ~graph() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    graph(const graph &)             = delete;
    graph & operator=(const graph &) = delete;

    // Rows of `width` values of 4 bytes, `stride` values apart.
    template <typename T> ggml_tensor * rows(ggml_type type, const exact<T> & data, int width, int stride, int n) {
        ggml_tensor * whole = ggml_new_tensor_2d(ctx, type, stride, n);
        inputs.push_back([whole, &data] { ggml_backend_tensor_set(whole, data.get(), 0, data.n * sizeof(T)); });
        return ggml_view_2d(ctx, whole, width, n, whole->nb[1], 0);
    }

    ggml_tensor * table(const stored & data, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2) {
        ggml_tensor * t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
        inputs.push_back([t, &data] { ggml_backend_tensor_set(t, data.bytes.get(), 0, data.bytes.n); });
        return t;
    }

    ggml_tensor * custom(int64_t ne0, int64_t ne1, std::vector<ggml_tensor *> args, ggml_custom_op_t function,
                         const ggml_dflash_tag & tag) {
        ggml_tensor * t = ggml_custom_4d(ctx, GGML_TYPE_F32, ne0, ne1, 1, 1, args.data(), (int) args.size(), function,
                                         GGML_N_TASKS_MAX, nullptr);
        ggml_dflash_set_tag(t, tag);
        return result(t);
    }

    ggml_tensor * result(ggml_tensor * t) {
        ggml_build_forward_expand(nodes, t);
        results.push_back(t);
        return t;
    }

    // False if the device does not take some node.
    bool ready(const machine & m) {
        for (ggml_tensor * t : results) {
            if (!m.supports(t)) {
                return false;
            }
        }
        buffer = ggml_backend_alloc_ctx_tensors(ctx, m.backend);
        for (const auto & input : inputs) {
            input();
        }
        return buffer != nullptr;
    }
};

ggml_tensor * add_conv(graph & g, const machine & m, const conv_case & p) {
    std::vector<ggml_tensor *> args = {
        g.rows(GGML_TYPE_F32, *p.x, p.H, p.x_stride, p.T),
        g.rows(GGML_TYPE_F32, *p.dynamic, 2 * p.n_taps * p.G(), p.d_stride, p.T),
        g.table(*p.base, p.type, p.H, p.n_taps, 2),
    };
    if (p.add) {
        args.push_back(g.rows(GGML_TYPE_F32, *p.residual, p.H, p.r_stride, p.T));
    }
    return g.custom(p.H, p.T, args, m.conv,
                    { GGML_DFLASH_MAGIC, GGML_DFLASH_CONV, p.n_tokens, 0, p.n_taps, p.group, p.side, 0 });
}

ggml_tensor * add_lattice(graph & g, const machine & m, const lattice_case & p) {
    std::vector<ggml_tensor *> args = {
        g.rows(GGML_TYPE_F32, *p.logits, p.V, p.l_stride, p.R),
        g.rows(GGML_TYPE_I32, *p.candidates, p.k, p.c_stride, p.R),
        g.rows(GGML_TYPE_F32, *p.gate, p.rank, p.g_stride, p.R),
        g.table(*p.books[0], p.types[0], p.rank, p.n_rows[0], 1),
        g.table(*p.books[1], p.types[1], p.rank, p.n_rows[1], 1),
        g.rows(GGML_TYPE_I32, *p.tokens, p.T, p.T, 1),
    };
    if (p.names) {
        ggml_tensor * names = ggml_new_tensor_1d(g.ctx, GGML_TYPE_I64, p.V);
        g.inputs.push_back([names, &p] { ggml_backend_tensor_set(names, p.names->get(), 0, ggml_nbytes(names)); });
        args.push_back(names);
    }
    return g.custom(p.width, p.T, args, m.lattice,
                    { GGML_DFLASH_MAGIC, GGML_DFLASH_LATTICE, p.n_tokens, p.n_drafted, 0, 0, 0, 0 });
}

// Computes three times, so that a CUDA graph is recorded and replayed, and checks each.
template <typename T>
void compute(graph & g, const machine & m, outcome & out, const std::function<void(const T *)> & check) {
    if (!g.ready(m)) {
        ++out.wrong;
        return;
    }
    ggml_tensor * t = g.results[0];
    std::vector<T> found(ggml_nelements(t));
    for (int i = 0; i < 3; ++i) {
        ggml_backend_tensor_memset(t, 0xff, 0, ggml_nbytes(t));
        m.compute(g.nodes, g.results);
        ggml_backend_tensor_get(t, found.data(), 0, ggml_nbytes(t));
        check(found.data());
    }
}

void one_case(const std::string & op, dice & d, const machine & m, outcome & out) {
    graph g;
    if (op == "conv") {
        const conv_case p(d, false);
        add_conv(g, m, p);
        compute<float>(g, m, out, [&](const float * dst) { p.check(dst, out); });
    } else if (op == "lattice") {
        const lattice_case p(d);
        add_lattice(g, m, p);
        compute<float>(g, m, out, [&](const float * dst) { p.check(dst, out); });
    } else {
        const int k      = d.one_of({ 1, 2, 7, 16, 31, 33, 64 });
        const int most   = m.emulated ? 9000 : 50000;
        const int n      = d.one_of({ 1025, 2048, 2049, 4096, d.within(1025, most), m.emulated ? 5000 : 248320 });
        const int n_rows = d.one_of({ 1, 2, m.emulated ? 3 : 15, m.emulated ? 4 : 60 });
        exact<float> src((size_t) n * n_rows);
        for (int r = 0; r < n_rows; ++r) {
            fill_row(&src[(size_t) r * n], n, d);
        }
        g.result(ggml_top_k(g.ctx, g.rows(GGML_TYPE_F32, src, n, n, n_rows), k));
        compute<int32_t>(g, m, out, [&](const int32_t * dst) {
            for (int r = 0; r < n_rows; ++r) {
                out.wrong += wrong_ids(&src[(size_t) r * n], n, dst + (size_t) r * k, k);
            }
        });
    }
}

// Each node is right but for one thing; all must be refused.
void refused(dice & d, const machine & m, outcome & out) {
    const auto altered = [&](ggml_tensor * t, const std::function<void(ggml_tensor *, ggml_dflash_tag &)> & change) {
        const ggml_tensor as_it_was = *t;
        ggml_dflash_tag   tag       = ggml_dflash_get_tag(t);
        out.wrong += !m.supports(t);
        change(t, tag);
        memcpy((char *) t->op_params + GGML_DFLASH_TAG_AT, &tag, sizeof(tag));
        out.wrong += m.supports(t);
        *t = as_it_was;
        ++out.cases;
    };
    graph g;
    const conv_case    c(d, false);
    const lattice_case l(d);
    ggml_tensor * conv    = add_conv(g, m, c);
    ggml_tensor * lattice = add_lattice(g, m, l);
    for (ggml_tensor * t : { conv, lattice }) {
        altered(t, [](ggml_tensor *, ggml_dflash_tag & tag) { tag.magic++; });
        altered(t, [](ggml_tensor *, ggml_dflash_tag & tag) { tag.kind = 9; });
        altered(t, [](ggml_tensor *, ggml_dflash_tag & tag) { tag.n_tokens = 0; });
        altered(t, [](ggml_tensor * node, ggml_dflash_tag & tag) { tag.n_tokens = (int) node->ne[1] + 1; });
        altered(t, [](ggml_tensor * node, ggml_dflash_tag &) { node->src[2] = nullptr; });
        altered(t, [](ggml_tensor * node, ggml_dflash_tag &) { node->type = GGML_TYPE_F16; });
    }
    const auto other = [&](const ggml_tensor * like, ggml_type type, int64_t ne0, int64_t ne1) {
        return ggml_new_tensor_3d(g.ctx, type, ne0, ne1, like->ne[2]);
    };
    altered(conv, [](ggml_tensor *, ggml_dflash_tag & tag) { tag.n_taps++; });
    altered(conv, [](ggml_tensor *, ggml_dflash_tag & tag) { tag.side = 2; });
    altered(conv, [](ggml_tensor * node, ggml_dflash_tag & tag) { tag.group = (int) node->ne[0] + 1; });
    altered(conv, [&](ggml_tensor * node, ggml_dflash_tag &) {
        node->src[2] = other(node->src[2], GGML_TYPE_I32, c.H, c.n_taps);
    });
    altered(conv, [&](ggml_tensor * node, ggml_dflash_tag &) {
        node->src[3] = other(node, GGML_TYPE_F32, c.H, c.T + 1);
    });
    altered(lattice, [](ggml_tensor *, ggml_dflash_tag & tag) { tag.n_drafted = tag.n_tokens; });
    altered(lattice, [](ggml_tensor *, ggml_dflash_tag & tag) { tag.n_drafted = 0; });
    for (int book : { 3, 4 }) {
        altered(lattice, [&](ggml_tensor * node, ggml_dflash_tag &) {
            node->src[book] = other(node->src[book], node->src[book]->type, l.rank, l.V - 1);
        });
        altered(lattice, [&](ggml_tensor * node, ggml_dflash_tag &) {
            node->src[2]        = other(node->src[2], GGML_TYPE_F32, 256, l.R);
            node->src[7 - book] = other(node->src[book], GGML_TYPE_F32, 256, l.V);
            node->src[book]     = other(node->src[book], GGML_TYPE_F32, 256, l.V);
            out.wrong += !m.supports(node);
            node->src[book] = other(node->src[book], GGML_TYPE_Q4_K, 256, l.V);
        });
    }
    altered(lattice, [&](ggml_tensor * node, ggml_dflash_tag &) {
        node->src[1] = other(node->src[1], GGML_TYPE_I32, GGML_DFLASH_MAX_TOP_K + 1, l.R);
    });
    altered(lattice, [&](ggml_tensor * node, ggml_dflash_tag &) { node->ne[0] = l.k + l.k * l.k - 1; });
    altered(lattice, [&](ggml_tensor * node, ggml_dflash_tag &) {
        node->src[6] = ggml_new_tensor_1d(g.ctx, GGML_TYPE_I64, l.V + 1);
    });
    altered(lattice, [&](ggml_tensor * node, ggml_dflash_tag &) {
        node->src[6] = ggml_new_tensor_1d(g.ctx, GGML_TYPE_I32, l.V);
    });
}

// ---- time --------------------------------------------------------------------------------------------------------

double microseconds(graph & g, const machine & m) {
    if (!g.ready(m)) {
        return NAN;
    }
    using clock = std::chrono::steady_clock;
    const int runs = 50;
    for (int i = 0; i < 5; ++i) {
        ggml_backend_graph_compute(m.backend, g.nodes);
    }
    ggml_backend_synchronize(m.backend);
    const auto start = clock::now();
    for (int i = 0; i < runs; ++i) {
        ggml_backend_graph_compute_async(m.backend, g.nodes);
    }
    ggml_backend_synchronize(m.backend);
    const double all = std::chrono::duration<double, std::micro>(clock::now() - start).count();
    return all / runs / g.results.size();
}

// 16 nodes in a graph, so that what a graph costs is shared.
void times(const machine & m, int n_blocks) {
    const int n = 16;
    dice d(1);
    double conv, lattice, top_k;
    {
        graph g;
        const conv_case p(d, n_blocks);
        for (int i = 0; i < n; ++i) {
            add_conv(g, m, p);
        }
        conv = microseconds(g, m);
    }
    {
        graph g;
        const lattice_case p(d, n_blocks);
        ggml_tensor * first = add_lattice(g, m, p);
        for (int i = 1; i < n; ++i) {
            const std::vector<ggml_tensor *> args(first->src, first->src + (first->src[6] ? 7 : 6));
            g.custom(p.width, p.T, args, m.lattice, ggml_dflash_get_tag(first));
        }
        lattice = microseconds(g, m);
    }
    {
        graph g;
        const int V = 248320, R = 7 * n_blocks;
        exact<float> src((size_t) V * R);
        for (size_t i = 0; i < src.n; ++i) {
            src[i] = d.normal();
        }
        ggml_tensor * logits = g.rows(GGML_TYPE_F32, src, V, V, R);
        for (int i = 0; i < n; ++i) {
            g.result(ggml_top_k(g.ctx, logits, 16));
        }
        top_k = microseconds(g, m);
    }
    printf("{\"n_blocks\": %d, \"conv_us\": %.2f, \"lattice_us\": %.2f, \"top_k_us\": %.2f}\n", n_blocks, conv, lattice,
           top_k);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 4) {
        return 2;
    }
    ggml_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) {
            fputs(text, stderr);
        }
    }, nullptr);
    machine m;
    m.emulated = false;
#ifdef DFLASH_EMULATED
    m.emulated = !strcmp(argv[1], "EMULATED");
#endif
    m.device = ggml_backend_dev_by_name(m.emulated ? "CPU" : argv[1]);
    if (m.device == nullptr) {
        fprintf(stderr, "error: no device `%s`\n", argv[1]);
        return 3;
    }
    m.backend = ggml_backend_dev_init(m.device, nullptr);

    ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t library = ggml_backend_dev_backend_reg(cpu);
    const auto function = [&](const char * name, ggml_custom_op_t plain) {
        void * found = ggml_backend_reg_get_proc_address(library, name);
        return found ? (ggml_custom_op_t) found : plain;
    };
    m.conv    = function("ggml_dflash_conv", plain_conv);
    m.lattice = function("ggml_dflash_lattice", plain_lattice);

    const std::string op = argv[2];
    if (op == "time") {
        times(m, atoi(argv[3]));
    } else if (op == "refused" && argc == 5) {
        outcome out;
        dice d((unsigned) atoi(argv[3]));
        for (int i = 0; i < atoi(argv[4]); ++i) {
            refused(d, m, out);
        }
        printf("{\"cases\": %d, \"wrong\": %ld}\n", out.cases, out.wrong);
    } else if ((op == "conv" || op == "lattice" || op == "top_k") && argc == 5) {
        outcome out;
        for (const unsigned seed = (unsigned) atoi(argv[3]); out.cases < atoi(argv[4]); ++out.cases) {
            dice d(seed + out.cases);
            one_case(op, d, m, out);
        }
        printf("{\"cases\": %d, \"wrong\": %ld, \"worst\": %.3g}\n", out.cases, out.wrong, out.worst);
    } else {
        return 2;
    }
    ggml_backend_free(m.backend);
    return 0;
}
