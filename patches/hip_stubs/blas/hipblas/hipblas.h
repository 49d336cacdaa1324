// Stands in for hipBLAS's header where hip_check.py compiles without hipBLAS: names only, nothing that could run.
#pragma once

using hipblasHandle_t      = void *;
using hipblasStatus_t      = int;
using hipblasOperation_t   = int;
using hipblasDatatype_t    = int;
using hipblasComputeType_t = int;

enum {
    HIPBLAS_COMPUTE_16F,
    HIPBLAS_COMPUTE_32F,
    HIPBLAS_COMPUTE_32F_FAST_16F,
    HIPBLAS_DIAG_NON_UNIT,
    HIPBLAS_FILL_MODE_UPPER,
    HIPBLAS_GEMM_DEFAULT,
    HIPBLAS_OP_N,
    HIPBLAS_OP_T,
    HIPBLAS_R_16B,
    HIPBLAS_R_16F,
    HIPBLAS_R_32F,
    HIPBLAS_SIDE_RIGHT,
    HIPBLAS_STATUS_ALLOC_FAILED,
    HIPBLAS_STATUS_ARCH_MISMATCH,
    HIPBLAS_STATUS_EXECUTION_FAILED,
    HIPBLAS_STATUS_INTERNAL_ERROR,
    HIPBLAS_STATUS_INVALID_VALUE,
    HIPBLAS_STATUS_MAPPING_ERROR,
    HIPBLAS_STATUS_NOT_INITIALIZED,
    HIPBLAS_STATUS_NOT_SUPPORTED,
    HIPBLAS_STATUS_SUCCESS,
};

inline hipblasStatus_t hipblasCreate(hipblasHandle_t *) { return HIPBLAS_STATUS_NOT_SUPPORTED; }
inline hipblasStatus_t hipblasDestroy(hipblasHandle_t) { return HIPBLAS_STATUS_NOT_SUPPORTED; }
inline hipblasStatus_t hipblasSetStream(hipblasHandle_t, void *) { return HIPBLAS_STATUS_NOT_SUPPORTED; }
