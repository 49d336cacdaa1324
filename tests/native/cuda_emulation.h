// CUDA kernels as plain C++: what dflash-kernels.cuh needs to be compiled for the CPU and run there.
//
// Every thread of a thread block is a fiber. A fiber runs until it has to wait for others (__syncthreads, a shuffle)
// or ends; the order in which fibers of a round run is chosen by the caller. Code that lacks a barrier therefore sees
// stale values in one order or another. Shared memory lies on the heap, each array by itself with its exact size, so
// that AddressSanitizer sees an index outside, and is filled with a pattern before each thread block.
//
// A barrier can be left out by its line (emulation::it().left_out), so that tests can show that it would be missed.
//
// Reported as errors, by throwing emulation::error from launch(): threads of a block that wait at different
// barriers, a shuffle that some lane of the warp does not take part in, more shared memory than a device gives.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define EMULATION_SANITIZED 1
#else
#define EMULATION_SANITIZED 0
#endif

// ---- the language ------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define DFLASH_SHARED(type, name, count)  type * name = emulation::shared<type>(#name, count)
#define DFLASH_SHARED_DYNAMIC(type, name) type * name = emulation::shared_dynamic<type>()

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) float4 {
    float x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }

struct half {
    uint16_t bits;
};

struct nv_bfloat16 {
    uint16_t bits;
};

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline float __fadd_rn(float a, float b) { return a + b; }  // compiled with -ffp-contract=off
inline float __fmul_rn(float a, float b) { return a * b; }

inline float emulated_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const int mantissa = bits & 1023;
    float x;
    if (exponent == 0) {
        x = std::ldexp((float) mantissa, -24);
    } else if (exponent == 31) {
        x = mantissa ? NAN : INFINITY;
    } else {
        x = std::ldexp((float) (mantissa | 1024), exponent - 25);
    }
    return bits >> 15 ? -x : x;
}

template <typename to> to ggml_cuda_cast(float x) { return x; }
template <typename to> to ggml_cuda_cast(half x) { return emulated_half(x.bits); }
template <typename to> to ggml_cuda_cast(nv_bfloat16 x) {
    const uint32_t bits = (uint32_t) x.bits << 16;
    float y;
    memcpy(&y, &bits, sizeof(y));
    return y;
}

inline void ggml_cuda_pdl_lc() {}
inline void ggml_cuda_pdl_sync() {}

// ---- the machine -------------------------------------------------------------------------------------------------

namespace emulation {

struct error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr size_t MAX_SHARED = 48 * 1024;
constexpr size_t STACK      = 64 * 1024;

enum class state { ready, block, warp, done };

struct fiber {
    ucontext_t         context;
    std::vector<char>  stack = std::vector<char>(STACK);
    void             * fake  = nullptr;
    state              now   = state::ready;
    uint64_t           slot  = 0;  // what it gives to a shuffle
};

struct shared_array {
    std::unique_ptr<char[]> data;
    size_t                  size;
};

struct machine {
    std::vector<fiber>                  fibers;
    std::map<std::string, shared_array> shared;
    std::unique_ptr<char[]>             dynamic;
    std::function<void()>               kernel;
    ucontext_t                          scheduler;
    void                              * scheduler_fake  = nullptr;
    const void                        * scheduler_stack = nullptr;
    size_t                              scheduler_size  = 0;
    size_t                              shared_bytes    = 0;
    unsigned                            now             = 0;  // running fiber
    int                                 pattern         = 0;
    int                                 left_out        = 0;  // line of a __syncthreads() that does nothing
};

inline machine & it() {
    static machine m;
    return m;
}

inline char * poisoned(size_t size) {
    char * data = new char[size];
    memset(data, it().pattern, size);
    return data;
}

template <typename T> T * shared(const char * name, size_t count) {
    machine & m = it();
    shared_array & a = m.shared[name];
    if (!a.data) {
        a.size = count * sizeof(T);
        a.data.reset(poisoned(a.size));
        m.shared_bytes += a.size;
        if (m.shared_bytes > MAX_SHARED) {
            fprintf(stderr, "more than 48 KB of shared memory\n");
            abort();
        }
    }
    return (T *) a.data.get();
}

template <typename T> T * shared_dynamic() { return (T *) it().dynamic.get(); }

inline void to_scheduler(bool last) {
    machine & m = it();
    fiber   & f = m.fibers[m.now];
#if EMULATION_SANITIZED
    __sanitizer_start_switch_fiber(last ? nullptr : &f.fake, m.scheduler_stack, m.scheduler_size);
#endif
    (void) last;
    swapcontext(&f.context, &m.scheduler);
#if EMULATION_SANITIZED
    __sanitizer_finish_switch_fiber(f.fake, &m.scheduler_stack, &m.scheduler_size);
#endif
}

inline void entry() {
    machine & m = it();
#if EMULATION_SANITIZED
    __sanitizer_finish_switch_fiber(nullptr, &m.scheduler_stack, &m.scheduler_size);
#endif
    m.kernel();
    m.fibers[m.now].now = state::done;
    to_scheduler(true);
}

inline void begin(fiber & f) {
    f.now  = state::ready;
    f.fake = nullptr;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp   = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link          = nullptr;
    makecontext(&f.context, entry, 0);
}

inline void wait(state s) {
    machine & m = it();
    m.fibers[m.now].now = s;
    to_scheduler(false);
}

inline void run(unsigned thread) {
    machine & m = it();
    fiber   & f = m.fibers[thread];
    m.now     = thread;
    threadIdx = dim3(thread, 0, 0);
#if EMULATION_SANITIZED
    __sanitizer_start_switch_fiber(&m.scheduler_fake, f.stack.data(), f.stack.size());
#endif
    swapcontext(&m.scheduler, &f.context);
#if EMULATION_SANITIZED
    __sanitizer_finish_switch_fiber(m.scheduler_fake, nullptr, nullptr);
#endif
}

// Lets go of those whose wait is over. False if nobody was.
inline bool release() {
    machine & m = it();
    const unsigned n = (unsigned) m.fibers.size();
    bool any = false;
    unsigned at_block = 0, done = 0;
    for (const fiber & f : m.fibers) {
        at_block += f.now == state::block;
        done     += f.now == state::done;
    }
    if (at_block > 0 && at_block + done == n) {
        for (fiber & f : m.fibers) {
            f.now = f.now == state::block ? state::ready : f.now;
        }
        return true;
    }
    for (unsigned w = 0; w < n; w += 32) {
        unsigned waiting = 0;
        for (unsigned i = w; i < w + 32 && i < n; ++i) {
            waiting += m.fibers[i].now == state::warp;
        }
        if (waiting == 32) {
            for (unsigned i = w; i < w + 32; ++i) {
                m.fibers[i].now = state::ready;
            }
            any = true;
        }
    }
    return any;
}

// The threads' turns. `order` 0 is ascending, 1 descending, others a seed for a new random order each round.
inline void launch(dim3 grid, unsigned threads, size_t dynamic_bytes, unsigned order, const std::function<void()> & kernel) {
    machine & m = it();
    std::mt19937 random(order);
    gridDim  = grid;
    blockDim = dim3(threads);
    m.kernel = kernel;
    m.fibers.resize(threads);
    std::vector<unsigned> turn(threads);
    for (unsigned b = 0; b < grid.x * grid.y * grid.z; ++b) {
        blockIdx = dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
        m.pattern = b % 2 ? 0xff : 0x5a;  // NaN, and a large number
        m.shared.clear();
        m.dynamic.reset(poisoned(dynamic_bytes));
        m.shared_bytes = dynamic_bytes;
        for (unsigned i = 0; i < threads; ++i) {
            turn[i] = order == 1 ? threads - 1 - i : i;
            begin(m.fibers[i]);
        }
        for (;;) {
            if (order > 1) {
                std::shuffle(turn.begin(), turn.end(), random);
            }
            for (unsigned i : turn) {
                if (m.fibers[i].now == state::ready) {
                    run(i);
                }
            }
            unsigned done = 0;
            for (const fiber & f : m.fibers) {
                done += f.now == state::done;
            }
            if (done == threads) {
                break;
            }
            if (!release()) {
                m.fibers.clear();
                throw error("threads of a block wait at different barriers");
            }
        }
    }
    m.shared.clear();
    m.dynamic.reset();
}

// What lane `from` of the caller's warp gives.
inline uint64_t exchange(uint64_t mine, unsigned from) {
    machine & m = it();
    const unsigned me = m.now;
    m.fibers[me].slot = mine;
    wait(state::warp);
    const uint64_t theirs = m.fibers[me / 32 * 32 + from].slot;
    wait(state::warp);
    return theirs;
}

}  // namespace emulation

inline void emulated_barrier(int line) {
    if (line != emulation::it().left_out) {
        emulation::wait(emulation::state::block);
    }
}

#define __syncthreads() emulated_barrier(__LINE__)

template <typename T> T __shfl_xor_sync(unsigned, T x, int lanes, int width) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "one slot");
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof(T));
    const unsigned lane = threadIdx.x % 32;
    const unsigned from = lane / width * width + (lane % width ^ lanes);
    bits = emulation::exchange(bits, from);
    memcpy(&x, &bits, sizeof(T));
    return x;
}

inline int atomicAdd(int * at, int x) {
    const int before = *at;
    *at += x;
    return before;
}
