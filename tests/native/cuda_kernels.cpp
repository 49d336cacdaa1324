// The kernels of ggml-cuda/dflash-kernels.cuh in the emulation, against plain references; used by test_cuda_kernels.py.
//
//     cuda_kernels KERNEL SEED CASES ORDER [LEFT_OUT]
//
// KERNEL: conv, lattice, top_k; divide (how rows are divided); index, lanes (planted faults). ORDER: that of the threads, see
// emulation::launch. LEFT_OUT: the line of a barrier to leave out.
// Prints JSON: how many cases, how many wrong values, and the largest error as a part of its bound.

#include "cuda_emulation.h"

#include "dflash-kernels.cuh"

#include "ggml.h"

#include <numeric>
#include <set>

namespace {

struct outcome {
    int    cases = 0;
    long   wrong = 0;
    double worst = 0.0;
};

struct dice {
    std::mt19937 random;
    int within(int low, int high) { return low + (int) (random() % (unsigned) (high - low + 1)); }
    bool once_in(int n) { return within(1, n) == 1; }
    float normal() { return std::normal_distribution<float>()(random); }
    template <typename T> T one_of(std::initializer_list<T> list) {
        return list.begin()[within(0, (int) list.size() - 1)];
    }
};

// Exactly n values, so that an index outside is seen.
template <typename T> struct exact {
    std::unique_ptr<T[]> data;
    size_t               n;
    explicit exact(size_t n) : data(new T[n]()), n(n) {}
    T & operator[](size_t i) { return data[i]; }
    T * get() { return data.get(); }
};

float number(dice & d) {
    if (d.once_in(40)) {
        return d.one_of({ 0.0f, -0.0f, 1e-40f, -1e38f, INFINITY });
    }
    return d.normal();
}

bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || __float_as_uint(a) == __float_as_uint(b);
}

// n values of a type as ggml stores them, and as ggml reads them.
struct stored {
    exact<char>        bytes;
    std::vector<float> values;

    stored(ggml_type type, int64_t width, int64_t rows, dice & d, size_t stride = 0)
        : bytes((rows - 1) * std::max(stride, ggml_row_size(type, width)) + ggml_row_size(type, width)),
          values(rows * width) {
        std::vector<float> x(width);
        stride = std::max(stride, ggml_row_size(type, width));
        for (int64_t r = 0; r < rows; ++r) {
            for (float & y : x) {
                y = d.normal();
            }
            char * row = bytes.get() + r * stride;
            if (type == GGML_TYPE_F32) {
                memcpy(row, x.data(), width * sizeof(float));
                std::copy(x.begin(), x.end(), &values[r * width]);
                continue;
            }
            // Packed aside: a row in the table need not be aligned for every type.
            std::vector<char> packed(ggml_row_size(type, width));
            ggml_quantize_chunk(type, x.data(), packed.data(), 0, 1, width, nullptr);
            ggml_get_type_traits(type)->to_float(packed.data(), &values[r * width], width);
            memcpy(row, packed.data(), packed.size());
        }
    }
};

// ---- convolution -------------------------------------------------------------------------------------------------

void conv(dice & d, unsigned order, outcome & out) {
    const int group    = d.one_of({ 1, 2, 3, 16, 64 });
    const int G        = d.within(1, group == 64 ? 9 : 40);
    const int H        = G * group;
    const int n_tokens = d.within(1, 9);
    const int n_blocks = d.within(1, 3);
    const int T        = n_tokens * n_blocks;
    const int n_taps   = d.within(1, 5);
    const int side     = d.within(0, 1);
    const bool add     = d.once_in(2);
    const ggml_type type = d.one_of({ GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 });

    const int x_stride = H + d.one_of({ 0, 0, 1, 17 });
    const int d_stride = 2 * n_taps * G + d.one_of({ 0, 3 });
    const int r_stride = H + d.one_of({ 0, 5 });
    exact<float> x((T - 1) * x_stride + H), dynamic((T - 1) * d_stride + 2 * n_taps * G), dst((size_t) H * T);
    exact<float> residual((T - 1) * r_stride + H);
    for (exact<float> * buffer : { &x, &dynamic, &residual }) {
        for (size_t i = 0; i < buffer->n; ++i) {
            (*buffer)[i] = number(d);
        }
    }
    std::fill(dst.get(), dst.get() + dst.n, NAN);
    stored base(type, H, 2 * n_taps, d);

    dflash_conv_args a;
    a.x               = x.get();
    a.dynamic         = dynamic.get() + side * n_taps * G;
    a.base            = base.bytes.get() + side * n_taps * ggml_row_size(type, H);
    a.residual        = add ? residual.get() : nullptr;
    a.dst             = dst.get();
    a.x_stride        = x_stride;
    a.dynamic_stride  = d_stride;
    a.residual_stride = r_stride;
    a.n_channels      = H;
    a.n_rows          = T;
    a.n_tokens        = n_tokens;
    a.n_taps          = n_taps;
    a.group           = group;

    const dim3 grid((H + DFLASH_CONV_THREADS - 1) / DFLASH_CONV_THREADS, d.within(1, T));
    emulation::launch(grid, DFLASH_CONV_THREADS, 0, order, [&] {
        switch (type) {
            case GGML_TYPE_F32: return dflash_conv<float>(a);
            case GGML_TYPE_F16: return dflash_conv<half>(a);
            default:            return dflash_conv<nv_bfloat16>(a);
        }
    });

    for (int i = 0; i < T; ++i) {
        for (int c = 0; c < H; ++c) {
            float sum = 0.0f;
            for (int t = 0; t < n_taps && t <= i % n_tokens; ++t) {
                const float dyn         = dynamic[i * d_stride + (side * n_taps + t) * G + c / group];
                const float coefficient = base.values[(side * n_taps + t) * H + c] + dyn;
                const float term        = coefficient * x[(i - t) * x_stride + c];
                sum = t == 0 ? term : sum + term;
            }
            const float expected = add ? residual[i * r_stride + c] + sum : sum;
            out.wrong += !same(dst[i * H + c], expected);
        }
    }
}

// ---- lattice -----------------------------------------------------------------------------------------------------

dflash_row_type row_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:  return DFLASH_ROW_F32;
        case GGML_TYPE_F16:  return DFLASH_ROW_F16;
        case GGML_TYPE_BF16: return DFLASH_ROW_BF16;
        case GGML_TYPE_Q8_0: return DFLASH_ROW_Q8_0;
        case GGML_TYPE_Q4_0: return DFLASH_ROW_Q4_0;
        case GGML_TYPE_Q4_1: return DFLASH_ROW_Q4_1;
        case GGML_TYPE_Q5_0: return DFLASH_ROW_Q5_0;
        default:             return DFLASH_ROW_Q5_1;
    }
}

// The bound: of `rank` products, each of three values, at most rank + 2 roundings come together in a sum, and
// values d * q + m are rounded where |d * q| and |m| may be larger than they are: up to about the row's largest.
void lattice(dice & d, unsigned order, outcome & out) {
    const auto some_type = [&] {
        return d.one_of({ GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                          GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1 });
    };
    const ggml_type types[2] = { some_type(), some_type() };
    const bool in_blocks = ggml_blck_size(types[0]) > 1 || ggml_blck_size(types[1]) > 1;
    const int rank      = in_blocks ? 32 * d.within(1, 9) : d.within(1, 200);
    const int k         = d.one_of({ 1, 2, 5, 16, 16, 17, 33, 64 });
    const int V         = k + d.within(0, 100);
    const int n_tokens  = d.within(2, 5);
    const int n_drafted = d.within(1, n_tokens - 1);
    const int n_blocks  = d.within(1, 2);
    const int T         = n_tokens * n_blocks;
    const int R         = n_drafted * n_blocks;
    const int width     = k + k * k + d.one_of({ 0, 1, 300 });

    const int l_stride = V + d.one_of({ 0, 7 });
    const int c_stride = k + d.one_of({ 0, 3 });
    const int g_stride = rank + d.one_of({ 0, 2 });
    exact<float>   logits((R - 1) * l_stride + V), gate((R - 1) * g_stride + rank), dst((size_t) width * T);
    exact<int32_t> candidates((R - 1) * c_stride + k), tokens(T);
    for (size_t i = 0; i < logits.n; ++i) {
        logits[i] = d.once_in(50) ? -INFINITY : 10 * d.normal();
    }
    for (size_t i = 0; i < gate.n; ++i) {
        gate[i] = d.normal();
    }
    for (int i = 0; i < T; ++i) {
        tokens[i] = d.within(0, V - 1);
    }
    std::vector<int> ids(V);
    std::iota(ids.begin(), ids.end(), 0);
    for (int r = 0; r < R; ++r) {
        std::shuffle(ids.begin(), ids.end(), d.random);
        std::copy(ids.begin(), ids.begin() + k, &candidates[r * c_stride]);
    }
    std::fill(dst.get(), dst.get() + dst.n, NAN);

    const int n_rows[2] = { V, V + d.within(0, 3) };
    const size_t strides[2] = { ggml_row_size(types[0], rank), ggml_row_size(types[1], rank) + d.one_of({ 0, 4 }) };
    stored books[2] = { stored(types[0], rank, n_rows[0], d, strides[0]), stored(types[1], rank, n_rows[1], d, strides[1]) };

    dflash_lattice_args a;
    a.logits            = logits.get();
    a.candidates        = candidates.get();
    a.gate              = gate.get();
    a.tokens            = tokens.get();
    a.dst               = dst.get();
    a.predecessors      = { books[0].bytes.get(), (int64_t) strides[0], n_rows[0], row_type(types[0]) };
    a.successors        = { books[1].bytes.get(), (int64_t) strides[1], n_rows[1], row_type(types[1]) };
    a.logits_stride     = l_stride;
    a.candidates_stride = c_stride;
    a.gate_stride       = g_stride;
    a.n_vocab           = V;
    a.width             = width;
    a.n_tokens          = n_tokens;
    a.n_drafted         = n_drafted;
    a.k                 = k;
    a.rank              = rank;
    a.tile              = d.once_in(3) ? 32 : dflash_lattice_tile(k, rank);
    emulation::launch(dim3(T), DFLASH_LATTICE_THREADS, dflash_lattice_shared(k, a.tile) * sizeof(float), order,
                      [&] { dflash_lattice(a); });

    double top[2] = { 0.0, 0.0 };
    for (int b = 0; b < 2; ++b) {
        for (float x : books[b].values) {
            top[b] = std::max(top[b], (double) std::fabs(x));
        }
    }
    const bool shifted[2] = { types[0] == GGML_TYPE_Q4_1 || types[0] == GGML_TYPE_Q5_1,
                              types[1] == GGML_TYPE_Q4_1 || types[1] == GGML_TYPE_Q5_1 };
    for (int t = 0; t < T; ++t) {
        const int p = t % n_tokens;
        const int r = t / n_tokens * n_drafted + p - 1;
        const float * row = &dst[(size_t) t * width];
        int used = 0;
        if (p >= 1 && p <= n_drafted) {
            used = k + k * k;
            for (int c = 0; c < k; ++c) {
                const int id = candidates[r * c_stride + c];
                out.wrong += row[c] != (float) id;
                for (int j = 0; j < k; ++j) {
                    const int before = p == 1 ? tokens[t - 1] : candidates[(r - 1) * c_stride + j];
                    const float logit = logits[r * l_stride + id];
                    double sum = logit, size = std::fabs((double) logit);
                    for (int q = 0; q < rank; ++q) {
                        const double x = books[0].values[(size_t) before * rank + q];
                        const double y = books[1].values[(size_t) id * rank + q];
                        const double g = gate[r * g_stride + q];
                        sum  += x * g * y;
                        size += (shifted[0] ? 2 * top[0] : std::fabs(x)) * std::fabs(g) * (shifted[1] ? 2 * top[1] : std::fabs(y));
                    }
                    const float found = row[k + j * k + c];
                    if (std::isinf(sum)) {
                        out.wrong += found != sum;
                        continue;
                    }
                    const double error = std::fabs(found - sum) / ((rank + 4) * std::ldexp(size, -24));
                    out.worst  = std::max(out.worst, error);
                    out.wrong += !(error <= 1.0);
                }
            }
        }
        for (int i = used; i < width; ++i) {
            out.wrong += __float_as_uint(row[i]) != 0;
        }
    }
}

// ---- top-k -------------------------------------------------------------------------------------------------------

void fill_row(float * row, int n, dice & d) {
    const int kind = d.within(0, 11);
    for (int i = 0; i < n; ++i) {
        switch (kind) {
            case 0:  row[i] = -INFINITY; break;
            case 1:  row[i] = 3.5f; break;
            case 2:  row[i] = NAN; break;
            case 3:  row[i] = (float) d.within(-2, 2); break;
            case 4:  row[i] = d.one_of({ 0.0f, -0.0f, 1e-42f, -1e-42f }); break;
            case 5:  row[i] = (float) i; break;
            case 6:  row[i] = (float) -i; break;
            case 7:  row[i] = d.once_in(500) ? d.normal() : -INFINITY; break;
            case 8:  row[i] = d.once_in(3) ? d.one_of({ NAN, -NAN, INFINITY, -INFINITY, 0.0f }) : d.normal(); break;
            case 9:  row[i] = (float) (i % 256 / 32 == 3) * d.normal(); break;  // one warp has them all
            case 10: row[i] = (float) (i % 256); break;
            default: row[i] = d.normal();
        }
    }
}

void top_k(dice & d, unsigned order, outcome & out) {
    const int tile    = DFLASH_TOP_K_TILE;
    const int k       = d.one_of({ 1, 2, 7, 16, 16, 31, 33, 63, 64 });
    const int n       = d.one_of({ k, k + 1, 300, tile - 1, tile, tile + 1, 2 * tile, 3 * tile + 77, d.within(k, 5 * tile) });
    const int n_rows  = d.within(1, 2);
    // As the launch divides a row, and in longer parts, as it would divide longer rows.
    const int length  = d.once_in(2) ? dflash_divide_row(n, k).length : tile * d.within(1, 3);
    const int n_parts = (n + length - 1) / length;

    exact<float> src((size_t) n * n_rows);
    exact<int32_t> dst((size_t) k * n_rows);
    exact<dflash_key> parts(n_parts > 1 ? (size_t) n_rows * n_parts * k : 0);
    for (int r = 0; r < n_rows; ++r) {
        fill_row(&src[(size_t) r * n], n, d);
    }
    std::fill(dst.get(), dst.get() + dst.n, -1);
    emulation::launch(dim3(n_rows * n_parts), DFLASH_TOP_K_THREADS, 0, order,
                      [&] { dflash_top_k_part(src.get(), parts.get(), dst.get(), n, n_parts, length, k); });
    if (n_parts > 1) {
        emulation::launch(dim3(n_rows), DFLASH_TOP_K_THREADS, 0, order,
                          [&] { dflash_top_k_merge(parts.get(), dst.get(), n_parts * k, k); });
    }

    std::vector<int> ids(n);
    for (int r = 0; r < n_rows; ++r) {
        const float * row = &src[(size_t) r * n];
        std::iota(ids.begin(), ids.end(), 0);
        const auto value = [&](int i) { return std::isnan(row[i]) ? -INFINITY : row[i]; };
        std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return value(a) > value(b); });
        for (int i = 0; i < k; ++i) {
            out.wrong += dst[(size_t) r * k + i] != ids[i];
        }
    }
}

// More keys than the second kernel takes in one tile.
void merge(dice & d, unsigned order, outcome & out) {
    const int k = d.within(1, 64);
    const int n = d.within(DFLASH_TOP_K_TILE + 1, 3 * DFLASH_TOP_K_TILE);
    exact<dflash_key> keys(n);
    exact<int32_t>    dst(k);
    std::set<dflash_key, std::greater<dflash_key>> sorted;
    for (int i = 0; i < n; ++i) {
        keys[i] = d.once_in(9) ? 0 : dflash_make_key(d.normal(), i);
        sorted.insert(keys[i]);
    }
    emulation::launch(dim3(1), DFLASH_TOP_K_THREADS, 0, order, [&] { dflash_top_k_merge(keys.get(), dst.get(), n, k); });
    auto next = sorted.begin();
    for (int i = 0; i < k; ++i) {
        out.wrong += dst[i] != dflash_key_id(*next++);
    }
}

// Parts cover the row, none is empty, and the second kernel's tiles stay few.
void divide(dice & d, outcome & out) {
    const int k = d.within(1, DFLASH_TOP_K_MAX_K);
    const int n = d.one_of({ d.within(1, 5000), d.within(5000, 300000), d.within(300000, 2000000000) });
    const dflash_top_k_parts parts = dflash_divide_row(n, k);
    const int64_t covered = (int64_t) parts.n_parts * parts.length;
    out.wrong += covered < n || covered - parts.length >= n || parts.length % DFLASH_TOP_K_TILE != 0;
    out.wrong += (int64_t) parts.n_parts * k > DFLASH_TOP_K_MERGED + k;
}

// ---- planted faults ----------------------------------------------------------------------------------------------

// Reverses its block's values; reads one value past the end of the last.
void index_fault(const int * src, int * dst, int n) {
    DFLASH_SHARED(int, values, 64);
    const int thread = threadIdx.x;
    values[thread] = thread + 1 < n ? src[thread] : 0;
    __syncthreads();
    dst[thread] = values[thread + 1];
}

// Half of a warp leaves before the shuffle.
void lanes_fault(int * dst) {
    const int thread = threadIdx.x;
    if (thread % 32 < 16) {
        dst[thread] = __shfl_xor_sync(0xffffffff, thread, 1, 32);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 5) {
        return 2;
    }
    const std::string kernel = argv[1];
    const unsigned    seed   = (unsigned) atoi(argv[2]);
    const int         cases  = atoi(argv[3]);
    const unsigned    order  = (unsigned) atoi(argv[4]);
    emulation::it().left_out = argc > 5 ? atoi(argv[5]) : 0;

    outcome out;
    try {
        for (; out.cases < cases; ++out.cases) {
            dice d;
            d.random.seed(seed + out.cases);
            if (kernel == "conv") {
                conv(d, order, out);
            } else if (kernel == "lattice") {
                lattice(d, order, out);
            } else if (kernel == "top_k") {
                top_k(d, order, out);
            } else if (kernel == "merge") {
                merge(d, order, out);
            } else if (kernel == "divide") {
                divide(d, out);
            } else if (kernel == "index") {
                exact<int> src(64), dst(64);
                emulation::launch(dim3(1), 64, 0, order, [&] { index_fault(src.get(), dst.get(), 64); });
            } else if (kernel == "lanes") {
                exact<int> dst(64);
                emulation::launch(dim3(1), 64, 0, order, [&] { lanes_fault(dst.get()); });
            } else {
                return 2;
            }
        }
    } catch (const emulation::error & e) {
        fprintf(stderr, "error: %s\n", e.what());
        return 1;
    }
    printf("{\"cases\": %d, \"wrong\": %ld, \"worst\": %.3g}\n", out.cases, out.wrong, out.worst);
    return 0;
}
