// Layer 0 in one launch: rows go to other ranks (push.cu) beside the GEMM over those that came: gather.cu, and
// gather_gemm.cu or, in block FP8, fp8_gather_gemm.cu; for layer 1's backward (IS_GRADIENT) grad_hidden.cu.
//
// A block has twelve warps: eight multiply, three load for them, one pushes rows until none are left.

constexpr int PUSHER = WARPS + LOADERS;
constexpr int THREADS = 32 * (PUSHER + 1);
static_assert(THREADS == 384);

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_gemm(
    const __grid_constant__ TensorMap weights_map, const char* __restrict__ received, const int* __restrict__ counts,
    const int* __restrict__ starts, const int* __restrict__ tiles, const int* __restrict__ num_tiles,
    const int* __restrict__ row_ids, const int* __restrict__ flags, int experts, int depth, int ffn,
    const __grid_constant__ Results results, const __grid_constant__ Fault fault, const __grid_constant__ Sends sends) {
    extern __shared__ char dynamic[];
    const Memory<Item> memory(dynamic, 2 * STAGING_BYTES);
    int* const first_piece = reinterpret_cast<int*>(memory.behind());

    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp == PUSHER && lane == 0) memory.init(1 + 32 * LOADERS, WARPS);
    Draws draws(sends.tickets + ITEM_TICKETS, memory.draws, warp == WARPS && lane == 0);
    const int epoch = __ldg(sends.epoch);
    const Parts parts{first_piece, first_piece + 2 * experts + 1};
    const Work work{counts, starts, parts, experts, depth, ffn};
    list_pieces(work, reinterpret_cast<const int4*>(tiles), __ldg(num_tiles), threadIdx.x, THREADS);
    __syncthreads();

    if (warp < WARPS) {
        take_registers<MULTIPLYING_REGISTERS>();
        const Recorder recorder(sends.events, sends.event_capacity, epoch, 0);
        multiply_items(work, memory, results, recorder, warp, lane);
        return;
    }
    give_registers<other_registers(MULTIPLYING_REGISTERS)>();
    if (warp < PUSHER) {
        const Arrivals arrivals{
            reinterpret_cast<const char*>(sends.x), received, row_ids, flags, fault, epoch, sends.rank,
            sends.max_tokens, 2 * sends.cols};
        load_items(work, arrivals, weights_map, memory, draws, warp - WARPS, lane);
    } else if (!IS_GRADIENT || !__any_sync(0xFFFFFFFF, has_failed(fault))) { // the plan may be older than what failed
        push_rows(sends, Recorder(sends.events, sends.event_capacity, epoch, 1), lane);
    }
}
