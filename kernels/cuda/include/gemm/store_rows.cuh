// A tile's products, rounded, as rows of the result.

#ifndef COMET_GEMM_STORE_ROWS_CUH
#define COMET_GEMM_STORE_ROWS_CUH

#include "mma.cuh"

template <class Config>
constexpr int ROWS_STAGING_BYTES = Config::STAGED_ROWS * SWIZZLE_BYTES; // bytes of each warpgroup

// Through shared memory, which turns columns of the result into rows of 64 columns, to 128 bytes of a row at a time.
template <class Config, class Tile>
__device__ __forceinline__ void store_tile(
    const Accumulator<Config>& sums, const Tile& tile, u16* __restrict__ out, int cols, u32 staging, int group,
    int warp, int lane) {
    using Output = typename Config::Output;
    constexpr int STAGED_ROWS = Config::STAGED_ROWS;
    static_assert(Config::MAX_TILE_ROWS % STAGED_ROWS == 0);
    const int chunk = 2 * warp + ((lane >> 3) & 1);
    const int in_pair = ((lane >> 4) << 3) + (lane & 7);
    const int col = tile.col + group * (Config::BLOCK_N / 2) + (lane % 8) * 8;
    u16* const target = out + u64(tile.first_row) * cols + col;
#pragma unroll
    for (int begin = 0; begin < Config::MAX_TILE_ROWS; begin += STAGED_ROWS) {
        if (begin >= tile.rows) break;
        warpgroup_sync(group);
#pragma unroll
        for (int row = begin; row < begin + STAGED_ROWS; row += Config::ROW_STEP) {
            const int place = row / 2;
            const u32 address = staging + (row - begin + in_pair) * SWIZZLE_BYTES + ((chunk ^ (lane & 7)) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(address), "r"(Output::pack(sums[place], sums[place + 1])),
                         "r"(Output::pack(sums[place + 2], sums[place + 3])),
                         "r"(Output::pack(sums[place + 4], sums[place + 5])),
                         "r"(Output::pack(sums[place + 6], sums[place + 7])) : "memory");
        }
        warpgroup_sync(group);
        if (col < cols) {
#pragma unroll
            for (int row = begin; row < begin + STAGED_ROWS; row += Config::ROW_STEP) {
                if (row >= tile.rows) break;
                const int in_stage = row - begin + 4 * warp + lane / 8;
                u32 x, y, z, w;
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                             : "r"(staging + in_stage * SWIZZLE_BYTES + ((lane % 8 ^ (in_stage & 7)) << 4)));
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                             ::"l"(target + u64(begin + in_stage) * cols), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
            }
        }
    }
    warpgroup_sync(group);
}

#endif
