// What becomes of layer 0's products in 16 bits: gate and up, rounded, and hidden = activation(gate, up); of
// fc2_dgrad's hidden's gradient, rounded.

#ifndef COMET_LAYER0_HIDDEN_CUH
#define COMET_LAYER0_HIDDEN_CUH

#include "../activation.cuh"
#include "../gemm/bias.cuh"
#include "../gemm/store_rows.cuh"
#include "../recorder.cuh"
#include "tiles.cuh"

// Results for Q routed rows; a kernel does not write those that are null.
struct HiddenArgs {
    void* hidden;               // (Q, F) in 16 bits, in block FP8 in e4m3; as fc2_dgrad its gradient
    u16* gate_up;               // (Q, 2F) gate | up, if SAVES_GATE_UP
    float* scales;              // (F / 128, Q), in block FP8
    const float* weight_scales; // (e, 2F / 128, D / 128), in block FP8
    s64 num_rows;               // Q
};

template <class Config>
struct HiddenStaging {
    static constexpr int GROUP_COLS = GatherProblem<Config>::TILE_COLS / 2; // columns of a warpgroup
    static constexpr int LINE_BYTES = 2 * GROUP_COLS;
    static constexpr int BYTES = Config::IS_DGRAD ? ROWS_STAGING_BYTES<Config>
                                                  : Config::STAGED_ROWS * LINE_BYTES; // bytes of each warpgroup
    static_assert(Config::MAX_TILE_ROWS % Config::STAGED_ROWS == 0);
};

// A tile's gate and up as they are rounded: a lane has two rows of one column for each eight rows.
template <class Config>
struct RoundedGateUp {
    using Output = typename Config::Output;
    u32 gate[Config::MAX_TILE_ROWS / 8], up[Config::MAX_TILE_ROWS / 8];

    __device__ __forceinline__ explicit RoundedGateUp(const Accumulator<Config>& sums) {
#pragma unroll
        for (int eight = 0; eight < Config::MAX_TILE_ROWS / 8; ++eight) {
            gate[eight] = Output::pack(sums[4 * eight], sums[4 * eight + 1]);
            up[eight] = Output::pack(sums[4 * eight + 2], sums[4 * eight + 3]);
        }
    }

    __device__ __forceinline__ u32 hidden(int eight) const {
        const float2 gates = Output::unpack(gate[eight]), ups = Output::unpack(up[eight]);
        return Output::pack(activate<Config>(gates.x, ups.x), activate<Config>(gates.y, ups.y));
    }
};

// Through shared memory, which turns columns into rows of 32 columns.
template <class Config, typename Value>
__device__ __forceinline__ void store_columns(
    Value value_at, u16* target, const GatheredTile& tile, u32 col, u32 stride, bool in_range, u32 staging, int group,
    int warp, int lane) {
    constexpr int STAGED_ROWS = Config::STAGED_ROWS, LINE_BYTES = HiddenStaging<Config>::LINE_BYTES;
    const int in_32 = 8 * warp + lane / 4;
#pragma unroll
    for (int begin = 0; begin < Config::MAX_TILE_ROWS; begin += STAGED_ROWS) {
        if (begin >= tile.rows) break;
        warpgroup_sync(group);
#pragma unroll
        for (int row = begin; row < begin + STAGED_ROWS; row += Config::ROW_STEP) {
            const int in_stage = row - begin + lane % 16;
            const u32 address = staging + in_stage * LINE_BYTES + ((warp ^ (in_stage >> 1 & 3)) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                         ::"r"(address), "r"(value_at(row / 8)), "r"(value_at(row / 8 + 1)) : "memory");
        }
        warpgroup_sync(group);
#pragma unroll
        for (int row = begin; row < begin + STAGED_ROWS; row += 32) {
            const int in_stage = row - begin + in_32;
            if (in_range && row + in_32 < tile.rows) {
                u32 x, y, z, w;
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                             : "r"(staging + in_stage * LINE_BYTES + ((lane % 4 ^ (in_stage >> 1 & 3)) << 4)));
                // The tile is read again each time: few registers are left.
                u16* const line = target + u64(u32(tile.first_row + row + in_32)) * stride + col;
                *reinterpret_cast<uint4*>(line) = make_uint4(x, y, z, w);
            }
        }
    }
}

template <class Config>
__device__ __forceinline__ void store_activated(
    const Accumulator<Config>& sums, const GatheredTile& tile, const HiddenArgs& args, int ffn, u32 staging, int group,
    int warp, int lane) {
    const RoundedGateUp<Config> rounded(sums);
    const int col = tile.col + group * HiddenStaging<Config>::GROUP_COLS + lane % 4 * 8;
    const bool in_range = col < ffn;
    const auto store = [&](auto value_at, u16* target, int stride) {
        store_columns<Config>(value_at, target, tile, col, stride, in_range, staging, group, warp, lane);
    };
    if constexpr (Config::SAVES_GATE_UP) {
        store([&](int eight) { return rounded.gate[eight]; }, args.gate_up, 2 * ffn);
        store([&](int eight) { return rounded.up[eight]; }, args.gate_up + ffn, 2 * ffn);
    }
    store([&](int eight) { return rounded.hidden(eight); }, static_cast<u16*>(args.hidden), ffn);
}

template <class Config>
__device__ __forceinline__ void record_tile(
    const Recorder<Config>& recorder, const GatheredTile& tile, int warp, int lane) {
    if (warp == 0 && lane == 0) {
        recorder.record(
            Config::KIND_LAYER0_TILE, tile.first_row / Config::PLAN_TILE_ROWS,
            tile.col / GatherProblem<Config>::TILE_COLS, tile.phase, tile.begin, tile.ready);
    }
}

// The work of the math warps, tile by tile.
template <class Config, class Storage>
__device__ __forceinline__ void multiply_hidden(
    const GatherProblem<Config>& problem, const Storage& storage, const HiddenArgs& args,
    const Recorder<Config>& recorder, int warp, int lane) {
    constexpr bool FENCES = true; // rows are what the producer's threads wrote
    const int group = warp / 4;
    compute_tiles<Config>(storage, problem.num_tiles(), [&](Pipeline<Config>& pipeline, const GatheredTile& tile) {
        const u32 staging = storage.staging + group * HiddenStaging<Config>::BYTES;
        Accumulator<Config> sums;
        ColumnBiases<Config> biases;
        if constexpr (Config::HAS_BIAS) {
            const int gate = tile.col + group * HiddenStaging<Config>::GROUP_COLS + warp % 4 * 8 + lane / 4;
            if (gate < problem.ffn) {
                biases.fetch(problem.biases, tile.expert, 2 * problem.ffn, gate, problem.ffn + gate);
            }
        }
        multiply_tile<FENCES>(pipeline, sums, biases, tile.rows, group, lane, problem.num_steps(), [] {});
        if constexpr (Config::IS_DGRAD) {
            store_tile<Config>(
                sums, tile, static_cast<u16*>(args.hidden), problem.ffn, staging, group, warp % 4, lane);
        } else {
            store_activated<Config>(sums, tile, args, problem.ffn, staging, group, warp % 4, lane);
        }
        record_tile(recorder, tile, warp, lane);
    });
}

#endif
