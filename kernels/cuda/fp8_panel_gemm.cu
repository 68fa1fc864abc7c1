// What becomes of layer 1's products in block FP8: rows of y, rounded.

constexpr int STAGING_BYTES = 0;

// 16 rows of a half, by way of `staging`, 64 columns of each at a time: so that a line of y is written at once.
__device__ __forceinline__ void store_rows(
    const float (&sums)[HALF_SUMS], u32 staging, u16* target, int cols, int lane) {
    const u32 written = staging + lane % 16 * LINE, read = staging + lane / 8 * LINE;
#pragma unroll
    for (int begin = 0; begin < HALF_COLS; begin += LINE / 2) {
#pragma unroll
        for (int eight = 0; eight < 8; eight += 2) {
            const float* const four = sums + 4 * (begin / 8 + eight);
            u32 words[4];
#pragma unroll
            for (int word = 0; word < 4; ++word) words[word] = pack(four[2 * word], four[2 * word + 1]);
            store_matrices(written + ((eight + lane / 16 ^ lane % 8) << 4), words);
        }
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 16; row += 4) {
            uint4 values;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                         : "r"(read + row * LINE + ((lane % 8 ^ (row + lane / 8) % 8) << 4)) : "memory");
            *reinterpret_cast<uint4*>(target + u64(row + lane / 8) * cols + begin + lane % 8 * 8) = values;
        }
        __syncwarp();
    }
}

__device__ __forceinline__ void compute_item(
    Ring& ring, const Item& item, Share& share, u16* y, const Work& work, int group, int warp, int lane) {
    Sums sums;
    const Region region(item.rows, group, warp, lane);
    const bool leads = warp == 0 && lane == 0;
    const int num_steps = work.num_steps(), num_blocks = work.cols / HALF_COLS;
    // The last half may lie outside; then it has the scales of the one before.
    const auto scales_of = [&](int half) {
        const int block = min(item.col / HALF_COLS + half, num_blocks - 1);
        return work.scales.weights + u64((item.expert * num_blocks + block) * num_steps);
    };
    const WeightScales<false> scales(scales_of(region.first_half), scales_of(1));
    // Of the item before, whose stores have had time to complete.
    multiply_region(ring, sums, scales, region, lane, num_steps, [&] { if (leads) share.tell(); });
    group_sync(group); // a matrix instruction reads for all four warps, and each has waited for its own only
    // What of the last stage no other warpgroup reads: own rows, or a half of the columns.
    u32 staging = ring.stages + ring.last() * STAGE_BYTES + (group * HALF_COLS + warp * 16) * LINE;
    if (region.is_whole) staging += WEIGHT_BYTES - group * GROUP_ROWS * LINE;
    u16* const target = y + u64(u32(item.first_row + region.row - lane / 4)) * work.cols;
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const int col = item.col + (region.first_half + half) * HALF_COLS;
        if (half < region.halves() && col < work.cols) store_rows(sums[half], staging, target + col, work.cols, lane);
    }
    fence_for_tensor_cores(); // of the stores to the stage, before the next copy to it
    __syncwarp();
    if (lane == 0) barrier_arrive_here(ring.empty + 8 * ring.last());
    group_sync(group);
    share.panel = item.panel;
    share.tiles = item.tiles;
}

__device__ __forceinline__ void multiply_items(
    const Work& work, const Memory<Item>& memory, u16* y, int* panel_counters, const Recorder& recorder, int warp,
    int lane) {
    const int group = warp / 4;
    compute_items(work, memory, panel_counters, recorder, warp, lane, [&](Ring& ring, const Item& item, Share& share) {
        compute_item(ring, item, share, y, work, group, warp % 4, lane);
    });
}
