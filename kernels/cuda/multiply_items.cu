// What the warps that multiply do in layer 0's GEMM, and in that of hidden's gradient, in 16 bits: item by item.

__device__ __forceinline__ void multiply_items(
    const Work& work, const Memory<Item>& memory, const Results& results, const Recorder& recorder, int warp,
    int lane) {
    const int group = warp / 4;
    Ring ring = memory.ring();
    int slot = 0;
    if (told_of(memory.draws, 0) >= work.num_items()) return;
    while (true) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const Item& item = memory.items[slot];
        slot = (slot + 1) % ITEM_SLOTS;
        const u64 begin = item.begin, ready = item.ready;
        const int first_row = item.first_row, col = item.col, phase = item.phase;
        compute_item(
            ring, item, results, work.ffn, memory.staging + group * STAGING_BYTES, group, warp % 4, lane,
            work.num_steps());
        if (warp == 0 && lane == 0) {
            recorder.record(KIND_LAYER0_TILE, first_row / TILE_ROWS, col / HIDDEN_COLS, phase, begin, ready);
        }
        if (item.is_last) break;
    }
}
