// Stands in for what HIP before 6 lacks and llama.cpp's headers name: for hip_check.py only.
#pragma once

#include <hip/hip_fp16.h>

#include <cstdint>
#include <cstring>

struct __hip_bfloat16 {
    uint16_t bits;

    __host__ __device__ operator float() const {
        const uint32_t wide = (uint32_t) bits << 16;
        float value;
        memcpy(&value, &wide, sizeof(value));
        return value;
    }
};

struct __hip_bfloat162 {
    __hip_bfloat16 x;
    __hip_bfloat16 y;
};

__host__ __device__ inline __hip_bfloat16 __float2bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
    return { (uint16_t) (wide >> 16) }; // without rounding: nothing is computed with it
}

__host__ __device__ inline float __bfloat162float(__hip_bfloat16 value) { return value; }

__device__ inline __half __hmax(__half a, __half b) { return (float) a > (float) b ? a : b; }

__device__ inline __half2 dflash_stub_half2(int bits) {
    __half2 value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

__device__ inline int dflash_stub_bits(__half2 value) {
    int bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

__device__ inline __half2 __shfl_xor(__half2 value, int mask, int width) {
    return dflash_stub_half2(__shfl_xor(dflash_stub_bits(value), mask, width));
}

__device__ inline __half2 __shfl_up(__half2 value, unsigned delta, int width) {
    return dflash_stub_half2(__shfl_up(dflash_stub_bits(value), delta, width));
}
