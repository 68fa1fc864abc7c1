// What becomes of layer 1's products: rows of y, rounded.

__device__ __forceinline__ void compute_item(
    Ring& ring, const Item& item, Share& share, u16* y, int cols, u32 staging, int group, int warp, int lane,
    int num_steps) {
    Sums sums;
    const bool leads = warp == 0 && lane == 0;
    // Of the item before, whose stores have had time to complete.
    multiply_item(ring, sums, item.rows, group, lane, num_steps, [&] { if (leads) share.tell(); });
    store_item(sums, item, y, cols, staging, group, warp, lane);
    share.panel = item.panel;
    share.tiles = item.tiles;
}

__device__ __forceinline__ void multiply_items(
    const Work& work, const Memory<Item>& memory, u16* y, int* panel_counters, const Recorder& recorder, int warp,
    int lane) {
    const int group = warp / 4, num_steps = work.num_steps();
    const u32 staging = memory.staging + group * STAGING_BYTES;
    compute_items(work, memory, panel_counters, recorder, warp, lane, [&](Ring& ring, const Item& item, Share& share) {
        compute_item(ring, item, share, y, work.cols, staging, group, warp % 4, lane, num_steps);
    });
}
