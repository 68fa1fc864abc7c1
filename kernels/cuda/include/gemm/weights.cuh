// TMA loads of an expert's weights, as their maps show them.

#ifndef COMET_GEMM_WEIGHTS_CUH
#define COMET_GEMM_WEIGHTS_CUH

#include "pipeline.cuh"

// BLOCK_N lines from column `col` on, of weights whose contraction is contiguous: (e, N, K).
__device__ __forceinline__ void load_lines(u32 target, const TensorMap& map, u32 barrier, int k, int col, int expert) {
    tma_load_3d(target, map, barrier, k, col, expert);
}

// The same of gate and up, which lie apart: (e, 2F, K) as (e, F / 8, 2, 8, K), interleaved in groups of 8.
__device__ __forceinline__ void load_gate_up(
    u32 target, const TensorMap& map, u32 barrier, int k, int col, int expert) {
    tma_load_5d(target, map, barrier, k, col / 8, expert);
}

// Weights whose columns are contiguous: (e, K, N). BLOCK_K lines of as many columns as a line has, twice.
template <class Config>
__device__ __forceinline__ void load_columns(
    u32 target, const TensorMap& map, u32 barrier, int k, int col, int expert) {
    tma_load_3d(target, map, barrier, col, k, expert);
    tma_load_3d(target + Config::BLOCK_K * SWIZZLE_BYTES, map, barrier, col + SWIZZLE_BYTES / 2, k, expert);
}

#endif
