// Expert biases: what is added to the products of a tile's columns, in float32, before they are rounded.
//
// They are fetched in pairs of columns, so that no load is narrower than four bytes: in 16 bits before a tile is
// multiplied, into two registers of a thread, which has two columns of all rows; in block FP8, where a thread has many
// columns of two rows, behind it, where registers are free again, a half's at once.

#ifndef COMET_GEMM_BIAS_CUH
#define COMET_GEMM_BIAS_CUH

#include "mma_fp8.cuh"

template <class Config>
using BiasPair = typename Config::Bias::Pair;

// The biases of columns `col` and `col` + 1 of an expert's `cols`; all of these are even.
template <class Config>
__device__ __forceinline__ const BiasPair<Config>* bias_pair(const void* biases, int expert, int cols, int col) {
    return static_cast<const BiasPair<Config>*>(biases) + (u64(u32(expert)) * u32(cols / 2) + u32(col / 2));
}

// In 16 bits, of the two columns that a thread has of a tile, odd ones in lanes of which lane / 4 is; those outside of
// the result get none.
template <class Config>
struct ColumnBiases {
    BiasPair<Config> pairs[2] = {};

    __device__ __forceinline__ void fetch(const void* biases, int expert, int cols, int first, int second) {
        pairs[0] = __ldg(bias_pair<Config>(biases, expert, cols, first));
        pairs[1] = __ldg(bias_pair<Config>(biases, expert, cols, second));
    }

    // To the sums of the first `ROWS` rows.
    template <int ROWS>
    __device__ __forceinline__ void add_to(Accumulator<Config>& sums, int lane) const {
        const bool is_odd = lane / 4 % 2;
        const float2 first = Config::Bias::unpack(pairs[0]), second = Config::Bias::unpack(pairs[1]);
        const float biases[2] = {is_odd ? first.y : first.x, is_odd ? second.y : second.x};
#pragma unroll
        for (int place = 0; place < ROWS / 2; ++place) sums[place] = __fadd_rn(sums[place], biases[place / 2 % 2]);
    }
};

// In block FP8, to the first `halves` of a region. Of each eight columns a thread has two, of both of its rows, whose
// biases lie at `pair_at(half, eight)`.
template <class Config, typename PairAt>
__device__ __forceinline__ void add_biases(Fp8Accumulator& sums, int halves, PairAt pair_at) {
    constexpr int EIGHTS = HALF_COLS / 8;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        if (half >= halves) break;
        BiasPair<Config> pairs[EIGHTS];
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) pairs[eight] = __ldg(pair_at(half, eight));
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            const float2 pair = Config::Bias::unpack(pairs[eight]);
#pragma unroll
            for (int index = 0; index < 4; ++index) {
                float& sum = sums[half][4 * eight + index];
                sum = __fadd_rn(sum, index % 2 ? pair.y : pair.x);
            }
        }
    }
}

#endif
