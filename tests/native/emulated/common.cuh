// What dflash.cu takes from llama.cpp's common.cuh, for the emulation.
#pragma once

#include "cuda_emulation.h"

#include "ggml.h"

struct block_q8_0 { char bytes[34]; };
struct block_q4_0 { char bytes[18]; };
struct block_q4_1 { char bytes[20]; };
struct block_q5_0 { char bytes[22]; };
struct block_q5_1 { char bytes[24]; };

typedef unsigned cudaStream_t;  // the order of the threads, see emulation::launch

struct ggml_cuda_pool {};

struct ggml_backend_cuda_context {
    cudaStream_t   order = 0;
    ggml_cuda_pool scratch;
    cudaStream_t stream() { return order; }
    ggml_cuda_pool & pool() { return scratch; }
};

template <typename T> struct ggml_cuda_pool_alloc {
    T * ptr = nullptr;
    std::vector<T> data;
    explicit ggml_cuda_pool_alloc(ggml_cuda_pool &) {}
    T * alloc(size_t n) {
        data.resize(n);
        return ptr = data.data();
    }
};

struct ggml_cuda_kernel_launch_params {
    dim3         grid, block;
    size_t       shared;
    cudaStream_t stream;
    ggml_cuda_kernel_launch_params(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
        : grid(grid), block(block), shared(shared), stream(stream) {}
};

template <typename... P, typename... A>
void ggml_cuda_kernel_launch(void (*kernel)(P...), const ggml_cuda_kernel_launch_params & p, A &&... args) {
    emulation::launch(p.grid, p.block.x, p.shared, p.stream, [&] { kernel(args...); });
}
