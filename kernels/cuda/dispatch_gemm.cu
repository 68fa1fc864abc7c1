// Layer 0 in one launch: rows go to other ranks (push.cu) beside the GEMM over those that came (gather_gemm.cu).
//
// A block has twelve warps: eight multiply, three load for them, one pushes rows until none are left.

constexpr int PUSHER = WARPS + LOADERS;
constexpr int THREADS = 32 * (PUSHER + 1);

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_gemm(
    const __grid_constant__ TensorMap weights_map, const u16* __restrict__ received, const int* __restrict__ counts, const int* __restrict__ starts,
    const int* __restrict__ tiles, const int* __restrict__ num_tiles, const int* __restrict__ row_ids,
    const int* __restrict__ flags, u16* __restrict__ hidden, u16* __restrict__ pre, int experts, int depth, int ffn,
    const __grid_constant__ Fault fault, const __grid_constant__ Sends sends) {
    extern __shared__ char memory[];
    const u32 base = (shared_address(memory) + 1023) & ~1023u;
    char* const aligned = memory + (base - shared_address(memory));
    const u32 staging = base + STAGES * STAGE_BYTES;
    const u32 full = staging + 2 * STAGING_BYTES, empty = full + 8 * STAGES;
    Item* const items = reinterpret_cast<Item*>(aligned + (empty + 8 * STAGES - base));
    int* const first_piece = reinterpret_cast<int*>(items + ITEM_SLOTS);

    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp == PUSHER && lane == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(full + 8 * stage, 1 + 32 * LOADERS);
            barrier_init(empty + 8 * stage, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    const int epoch = __ldg(sends.epoch);
    const Parts parts{first_piece, first_piece + 2 * experts + 1};
    const Work work{counts, starts, parts, experts, depth, ffn};
    list_pieces(work, reinterpret_cast<const int4*>(tiles), __ldg(num_tiles), threadIdx.x, THREADS);
    __syncthreads();

    if (warp < WARPS) {
        const Recorder recorder(sends.events, sends.event_capacity, epoch, 0);
        multiply_items(work, items, Results{hidden, pre}, base, full, empty, staging, recorder, warp, lane);
    } else if (warp < PUSHER) {
        const Arrivals arrivals{sends.x, received, row_ids, flags, fault, epoch, sends.rank, sends.max_tokens};
        load_items(work, arrivals, weights_map, items, base, full, empty, warp - WARPS, lane);
    } else {
        push_rows(sends, Recorder(sends.events, sends.event_capacity, epoch, 1), lane);
    }
}
