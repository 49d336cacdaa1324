// The kernels of ggml-cuda/dflash-kernels.cuh in the emulation, against plain references; used by test_cuda_kernels.py.
//
//     cuda_kernels KERNEL SEED CASES ORDER [LEFT_OUT]
//
// KERNEL: conv, lattice, top_k; divide (how rows are divided); index, lanes (planted faults). ORDER: that of the threads, see
// emulation::launch. LEFT_OUT: the line of a barrier to leave out.
// Prints JSON: how many cases, how many wrong values, and the largest error as a part of its bound.

#include "cuda_emulation.h"

#include "dflash-kernels.cuh"

#include "cuda_cases.h"

#include <set>

namespace {

void conv(dice & d, unsigned order, outcome & out) {
    const conv_case p(d, true);
    exact<float> dst((size_t) p.H * p.T);
    std::fill(dst.get(), dst.get() + dst.n, NAN);

    dflash_conv_args a;
    a.x               = p.x->get();
    a.dynamic         = p.dynamic->get() + p.side * p.n_taps * p.G();
    a.base            = p.base->bytes.get() + p.side * p.n_taps * ggml_row_size(p.type, p.H);
    a.residual        = p.add ? p.residual->get() : nullptr;
    a.dst             = dst.get();
    a.x_stride        = p.x_stride;
    a.dynamic_stride  = p.d_stride;
    a.residual_stride = p.r_stride;
    a.n_channels      = p.H;
    a.n_rows          = p.T;
    a.n_tokens        = p.n_tokens;
    a.n_taps          = p.n_taps;
    a.group           = p.group;

    const dim3 grid((p.H + DFLASH_CONV_THREADS - 1) / DFLASH_CONV_THREADS, d.within(1, p.T));
    emulation::launch(grid, DFLASH_CONV_THREADS, 0, order, [&] {
        switch (p.type) {
            case GGML_TYPE_F32: return dflash_conv<float>(a);
            case GGML_TYPE_F16: return dflash_conv<half>(a);
            default:            return dflash_conv<nv_bfloat16>(a);
        }
    });
    p.check(dst.get(), out);
}

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

void lattice(dice & d, unsigned order, outcome & out) {
    const lattice_case p(d);
    exact<float> dst((size_t) p.width * p.T);
    std::fill(dst.get(), dst.get() + dst.n, NAN);

    dflash_lattice_args a;
    a.logits            = p.logits->get();
    a.candidates        = p.candidates->get();
    a.gate              = p.gate->get();
    a.tokens            = p.tokens->get();
    a.names             = p.names ? p.names->get() : nullptr;
    a.dst               = dst.get();
    a.predecessors      = { p.books[0]->bytes.get(), (int64_t) p.strides[0], p.n_rows[0], row_type(p.types[0]) };
    a.successors        = { p.books[1]->bytes.get(), (int64_t) p.strides[1], p.n_rows[1], row_type(p.types[1]) };
    a.logits_stride     = p.l_stride;
    a.candidates_stride = p.c_stride;
    a.gate_stride       = p.g_stride;
    a.n_vocab           = p.V;
    a.width             = p.width;
    a.n_tokens          = p.n_tokens;
    a.n_drafted         = p.n_drafted;
    a.k                 = p.k;
    a.rank              = p.rank;
    a.tile              = d.once_in(3) ? 32 : dflash_lattice_tile(p.k, p.rank);
    emulation::launch(dim3(p.T), DFLASH_LATTICE_THREADS, dflash_lattice_shared(p.k, a.tile) * sizeof(float), order,
                      [&] { dflash_lattice(a); });
    p.check(dst.get(), out);
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
                      [&] { dflash_top_k<float>(src.get(), parts.get(), dst.get(), n, n_parts, length, k); });
    if (n_parts > 1) {
        emulation::launch(dim3(n_rows), DFLASH_TOP_K_THREADS, 0, order,
                          [&] { dflash_top_k<dflash_key>(parts.get(), nullptr, dst.get(), n_parts * k, 1, n_parts * k, k); });
    }

    for (int r = 0; r < n_rows; ++r) {
        out.wrong += wrong_ids(&src[(size_t) r * n], n, &dst[(size_t) r * k], k);
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
    emulation::launch(dim3(1), DFLASH_TOP_K_THREADS, 0, order,
                      [&] { dflash_top_k<dflash_key>(keys.get(), nullptr, dst.get(), n, 1, n, k); });
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
            dice d(seed + out.cases);
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
