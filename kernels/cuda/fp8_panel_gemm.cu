// What becomes of layer 1's products in block FP8: rows of y, rounded.

constexpr int STAGING_BYTES = 0;

// One of a thread's two rows of a half, 128 columns of y: of each 32 every one of four lanes has eight neighbours.
__device__ __forceinline__ void store_row(
    const float (&sums)[HALF_SUMS], int row, u16* target, int col, int cols, bool exists, int lane) {
#pragma unroll
    for (int begin = 0; begin < 16; begin += 4) {
        u32 words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const int place = 4 * (begin + word) + 2 * row;
            words[word] = pack(sums[place], sums[place + 1]);
        }
        transpose_words(words, lane);
        const int first = col + 8 * (begin + lane % 4);
        if (exists && first < cols) {
            *reinterpret_cast<uint4*>(target + first) = make_uint4(words[0], words[1], words[2], words[3]);
        }
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
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        if (half >= region.halves()) break;
        const int col = item.col + (region.first_half + half) * HALF_COLS;
#pragma unroll
        for (int place = 0; place < 2; ++place) {
            const int row = region.row + 8 * place;
            u16* const target = y + u64(u32(item.first_row + row)) * work.cols;
            store_row(sums[half], place, target, col, work.cols, row < item.rows, lane);
        }
    }
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
