// Random problems for the three kernels of ggml-cuda/dflash.cu, and what is right; used by cuda_kernels.cpp, which runs them in
// the emulation, and cuda_ops.cpp, which runs them on a device.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

struct outcome {
    int    cases = 0;
    long   wrong = 0;
    double worst = 0.0;
};

struct dice {
    std::mt19937 random;
    explicit dice(unsigned seed) : random(seed) {}
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
    const T & operator[](size_t i) const { return data[i]; }
    T * get() const { return data.get(); }
};

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || bits_of(a) == bits_of(b);
}

// n values of a type as ggml stores them, and as ggml reads them.
struct stored {
    exact<char>        bytes;
    std::vector<float> values;

    stored(ggml_type type, int64_t width, int64_t rows, dice & d)
        : bytes(rows * ggml_row_size(type, width)), values(rows * width) {
        std::vector<float> x(width);
        const size_t stride = ggml_row_size(type, width);
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
            ggml_quantize_chunk(type, x.data(), row, 0, 1, width, nullptr);
            ggml_get_type_traits(type)->to_float(row, &values[r * width], width);
        }
    }
};

// ---- convolution -------------------------------------------------------------------------------------------------

struct conv_case {
    int group, H, n_tokens, T, n_taps, side;
    bool add;  // a residual
    ggml_type type;
    int x_stride, d_stride, r_stride;
    std::unique_ptr<exact<float>> x, dynamic, residual;
    std::unique_ptr<stored> base;

    int G() const { return H / group; }

    // `tiny`: with values that a device may take for 0.
    conv_case(dice & d, bool tiny) {
        group    = d.one_of({ 1, 2, 3, 16, 64 });
        H        = group * d.within(1, group == 64 ? 9 : 40);
        n_tokens = d.within(1, 9);
        T        = n_tokens * d.within(1, 3);
        n_taps   = d.within(1, 5);
        side     = d.within(0, 1);
        add      = d.once_in(2);
        type     = d.one_of({ GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 });
        fill(d, tiny);
    }

    // The published draft's.
    conv_case(dice & d, int n_blocks)
        : group(16), H(5120), n_tokens(8), T(8 * n_blocks), n_taps(2), side(1), add(true), type(GGML_TYPE_F32) {
        fill(d, false);
    }

    void fill(dice & d, bool tiny) {
        x_stride = H + d.one_of({ 0, 0, 1, 17 });
        d_stride = 2 * n_taps * G() + d.one_of({ 0, 3 });
        r_stride = H + d.one_of({ 0, 5 });
        x        = std::make_unique<exact<float>>((T - 1) * x_stride + H);
        dynamic  = std::make_unique<exact<float>>((T - 1) * d_stride + 2 * n_taps * G());
        residual = std::make_unique<exact<float>>((T - 1) * r_stride + H);
        for (exact<float> * buffer : { x.get(), dynamic.get(), residual.get() }) {
            for (size_t i = 0; i < buffer->n; ++i) {
                (*buffer)[i] = !d.once_in(40) ? d.normal() : d.one_of({ 0.0f, -0.0f, tiny ? 1e-40f : 1e-8f, -1e38f, INFINITY });
            }
        }
        base = std::make_unique<stored>(type, H, 2 * n_taps, d);
    }

    float expected(int c, int i) const {
        float sum = 0.0f;
        for (int t = 0; t < n_taps && t <= i % n_tokens; ++t) {
            const float dyn         = (*dynamic)[(size_t) i * d_stride + (side * n_taps + t) * G() + c / group];
            const float coefficient = base->values[(size_t) (side * n_taps + t) * H + c] + dyn;
            const float term        = coefficient * (*x)[(size_t) (i - t) * x_stride + c];
            sum = t == 0 ? term : sum + term;
        }
        return add ? (*residual)[(size_t) i * r_stride + c] + sum : sum;
    }

    void check(const float * dst, outcome & out) const {
        for (int i = 0; i < T; ++i) {
            for (int c = 0; c < H; ++c) {
                out.wrong += !same(dst[(size_t) i * H + c], expected(c, i));
            }
        }
    }
};

// ---- lattice -----------------------------------------------------------------------------------------------------

struct lattice_case {
    ggml_type types[2];
    int rank, k, V, n_tokens, n_drafted, T, R, width;
    int l_stride, c_stride, g_stride;
    int n_rows[2];
    size_t strides[2];
    std::unique_ptr<exact<float>> logits, gate;
    std::unique_ptr<exact<int32_t>> candidates, tokens;
    std::unique_ptr<exact<int64_t>> names;  // null: logits of all tokens
    std::unique_ptr<stored> books[2];

    explicit lattice_case(dice & d) {
        for (ggml_type & type : types) {
            type = d.one_of({ GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                              GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1 });
        }
        if (d.once_in(2)) {
            types[1] = types[0];
        }
        const bool in_blocks = ggml_blck_size(types[0]) > 1 || ggml_blck_size(types[1]) > 1;
        rank      = in_blocks ? 32 * d.within(1, 9) : d.within(1, 200);
        k         = d.one_of({ 1, 2, 5, 16, 16, 17, 33, 64 });
        V         = k + d.within(0, 100);
        n_tokens  = d.within(2, 5);
        n_drafted = d.within(1, n_tokens - 1);
        T         = n_tokens * d.within(1, 2);
        width     = k + k * k + d.one_of({ 0, 1, 300 });
        fill(d);
    }

    // The published draft's.
    lattice_case(dice & d, int n_blocks)
        : types{ GGML_TYPE_Q8_0, GGML_TYPE_Q8_0 }, rank(256), k(16), V(248320), n_tokens(8), n_drafted(7),
          T(8 * n_blocks), width(5120) {
        fill(d);
    }

    void fill(dice & d) {
        R          = T / n_tokens * n_drafted;
        l_stride   = V + d.one_of({ 0, 7 });
        c_stride   = k + d.one_of({ 0, 3 });
        g_stride   = rank + d.one_of({ 0, 2 });
        logits     = std::make_unique<exact<float>>((size_t) (R - 1) * l_stride + V);
        gate       = std::make_unique<exact<float>>((R - 1) * g_stride + rank);
        candidates = std::make_unique<exact<int32_t>>((R - 1) * c_stride + k);
        tokens     = std::make_unique<exact<int32_t>>(T);
        for (size_t i = 0; i < logits->n; ++i) {
            (*logits)[i] = d.once_in(50) ? -INFINITY : 10 * d.normal();
        }
        for (size_t i = 0; i < gate->n; ++i) {
            (*gate)[i] = d.normal();
        }
        const int n_tokens_all = d.once_in(2) ? V : V + d.within(0, 100);
        if (n_tokens_all > V || d.once_in(4)) {
            std::vector<int64_t> all(n_tokens_all);
            std::iota(all.begin(), all.end(), 0);
            names = std::make_unique<exact<int64_t>>(V);
            for (int i = 0; i < V; ++i) {
                std::swap(all[i], all[d.within(i, n_tokens_all - 1)]);
                (*names)[i] = all[i];
            }
        }
        for (int i = 0; i < T; ++i) {
            (*tokens)[i] = d.within(0, n_tokens_all - 1);
        }
        std::vector<int> ids(V);
        std::iota(ids.begin(), ids.end(), 0);
        for (int r = 0; r < R; ++r) {
            for (int i = 0; i < k; ++i) {
                std::swap(ids[i], ids[d.within(i, V - 1)]);
                (*candidates)[r * c_stride + i] = ids[i];
            }
        }
        for (int b = 0; b < 2; ++b) {
            n_rows[b]  = n_tokens_all + (b == 0 ? 0 : d.within(0, 3));
            strides[b] = ggml_row_size(types[b], rank);
            books[b]   = std::make_unique<stored>(types[b], rank, n_rows[b], d);
        }
    }

    // The bound: of `rank` products of three values each, at most rank + 4 roundings come together in a sum. Values
    // d * q + m are rounded where |d * q| and |m| may be larger than they are, up to about twice the largest.
    void check(const float * dst, outcome & out) const {
        double top[2];
        for (int b = 0; b < 2; ++b) {
            const bool shifted = types[b] == GGML_TYPE_Q4_1 || types[b] == GGML_TYPE_Q5_1;
            top[b] = 0.0;
            for (size_t i = 0; shifted && i < books[b]->values.size(); ++i) {
                top[b] = std::max(top[b], 2.0 * std::fabs(books[b]->values[i]));
            }
        }
        for (int t = 0; t < T; ++t) {
            const int p = t % n_tokens;
            const int r = t / n_tokens * n_drafted + p - 1;
            const float * row = dst + (size_t) t * width;
            const int used = p >= 1 && p <= n_drafted ? k + k * k : 0;
            for (int i = used; i < width; ++i) {
                out.wrong += bits_of(row[i]) != 0;
            }
            for (int c = 0; c < k && used > 0; ++c) {
                const int column = (*candidates)[r * c_stride + c];
                const int id     = token(column);
                out.wrong += row[c] != (float) id;
                for (int j = 0; j < k; ++j) {
                    const int before = p == 1 ? (*tokens)[t - 1] : token((*candidates)[(r - 1) * c_stride + j]);
                    score(row[k + j * k + c], r, before, column, top, out);
                }
            }
        }
    }

  private:
    int token(int column) const { return names ? (int) (*names)[column] : column; }

    void score(float found, int r, int before, int column, const double (&top)[2], outcome & out) const {
        const int id = token(column);
        double sum  = (*logits)[(size_t) r * l_stride + column];
        double size = std::fabs(sum);
        for (int q = 0; q < rank; ++q) {
            const double x = books[0]->values[(size_t) before * rank + q];
            const double y = books[1]->values[(size_t) id * rank + q];
            const double g = (*gate)[r * g_stride + q];
            sum  += x * g * y;
            size += std::max(top[0], std::fabs(x)) * std::fabs(g) * std::max(top[1], std::fabs(y));
        }
        if (std::isinf(sum)) {
            out.wrong += found != sum;
            return;
        }
        const double error = std::fabs(found - sum) / ((rank + 4) * std::ldexp(size, -24));
        out.worst  = std::max(out.worst, error);
        out.wrong += !(error <= 1.0);
    }
};

// ---- top-k -------------------------------------------------------------------------------------------------------

// A row of one of 12 kinds: nothing but -infinity, NaN or one value; few values, zeros of both signs; rising, falling; ...
inline void fill_row(float * row, int n, dice & d) {
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

// How many of the k ids found are not the right ones: descending, ties by lower id, NaN as -infinity.
inline long wrong_ids(const float * row, int n, const int32_t * found, int k) {
    std::vector<int> ids(n);
    std::iota(ids.begin(), ids.end(), 0);
    const auto value = [&](int i) { return std::isnan(row[i]) ? -INFINITY : row[i]; };
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return value(a) > value(b); });
    long wrong = 0;
    for (int i = 0; i < k; ++i) {
        wrong += found[i] != ids[i];
    }
    return wrong;
}
