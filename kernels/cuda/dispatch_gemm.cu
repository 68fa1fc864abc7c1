// Layer 0 in one launch: rows go to other ranks while the GEMM and the activation run over those that came. As
// fc2_dgrad the same kernel takes gradients back through layer 1's weights.
//
// A block has twelve warps: eight multiply, three load for them, one pushes rows until none are left.
//
// With IS_SPLIT the first blocks that run, `comm_blocks` of them, push rows with all their warps, and turn to the GEMM
// when none are left; the other blocks push none. Why that ends, in whatever order blocks find a place on the GPU: rows
// are pushed by blocks that run, which do not wait before all are pushed; a tile waits for rows that other ranks
// push, and their launches have such blocks, too.

#include "include/layer0/hidden.cuh"
#include "include/layer0/hidden_fp8.cuh"
#include "include/layer0/producer.cuh"
#include "include/layer0/push.cuh"

struct GatherGemmArgs {
    TensorMap weights_map;
    const char* received;  // (W * M, ..) receive buffer
    const int* counts;     // (e,) routed rows of each expert
    const int* starts;     // (e,) first routed row of each expert
    const int* plan_tiles; // (.., 4) local expert, first routed row, valid rows, phase
    const int* num_plan_tiles;
    const int* row_ids; // (Q,) received row of each routed row
    const int* flags;   // (W, M / CHUNK)
    int experts, depth, ffn;
    const void* biases; // (e, 2F) of gate | up, if HAS_BIAS
};

// Bytes of staging memory for both math warpgroups.
template <class Config>
constexpr int dispatch_gemm_staging_bytes() {
    if constexpr (Config::IS_FP8) return Maxima<Config>::BYTES;
    else return 2 * HiddenStaging<Config>::BYTES;
}

// Rows of this rank, until none are left.
template <class Config>
__device__ __forceinline__ void push(
    const Fault& fault, const DispatchArgs& dispatch, int epoch, int worker, int lane) {
    // The plan of a gradient may be older than what failed.
    if (Config::IS_DGRAD && __any_sync(ALL_LANES, has_failed(fault))) return;
    push_rows(dispatch, Recorder<Config>(dispatch.events, dispatch.event_capacity, epoch, worker), lane);
}

// Whether this block is one of the first that run. By all of its threads.
__device__ __forceinline__ bool is_comm_block(const DispatchArgs& dispatch) {
    return __syncthreads_or(threadIdx.x == 0 && next_ticket(dispatch.tickets + BLOCK_COUNTER) < dispatch.comm_blocks);
}

template <class Config>
__device__ __forceinline__ void dispatch_gemm(
    const GatherGemmArgs& gemm, const HiddenArgs& hidden, const Fault& fault, const DispatchArgs& dispatch) {
    constexpr int PUSHER = Config::MATH_WARPS + Config::PRODUCER_WARPS;
    static_assert(Config::THREADS == 32 * (PUSHER + 1));
    using Storage = SharedStorage<Config, GatheredTile, dispatch_gemm_staging_bytes<Config>()>;
    static_assert(Storage::BYTES + Segments::BYTES_MORE == Config::SHARED_BYTES);
    static_assert(Segments::BYTES_PER_EXPERT == Config::SHARED_BYTES_PER_EXPERT);
    extern __shared__ char dynamic[];
    const Storage storage(dynamic);
    int* const first_tile = reinterpret_cast<int*>(storage.behind());

    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if constexpr (Config::IS_SPLIT) {
        if (is_comm_block(dispatch)) push<Config>(fault, dispatch, __ldg(dispatch.epoch), warp, lane);
    }
    if (warp == PUSHER && lane == 0) storage.init(1 + 32 * Config::PRODUCER_WARPS, Config::MATH_WARPS);
    TileScheduler<Config> scheduler(
        dispatch.tickets + TILE_COUNTER, storage.slots, warp == Config::MATH_WARPS && lane == 0);
    const int epoch = __ldg(dispatch.epoch), experts = gemm.experts;
    const Segments segments{first_tile, first_tile + 2 * experts + 1};
    const GatherProblem<Config> problem{
        gemm.counts, gemm.starts, segments, experts, gemm.depth, as_32_bits(gemm.ffn), gemm.biases};
    list_row_tiles(problem, reinterpret_cast<const int4*>(gemm.plan_tiles), __ldg(gemm.num_plan_tiles), threadIdx.x);
    __syncthreads();

    if (warp < Config::MATH_WARPS) {
        take_math_registers<Config>();
        const Recorder<Config> recorder(dispatch.events, dispatch.event_capacity, epoch, 0);
        if constexpr (Config::IS_FP8) {
            multiply_hidden_fp8(problem, storage, hidden, recorder, warp, lane);
        } else {
            multiply_hidden(problem, storage, hidden, recorder, warp, lane);
        }
        return;
    }
    give_math_registers<Config>();
    if (warp < PUSHER) {
        const ReceivedRows<Config> received{
            reinterpret_cast<const char*>(dispatch.x), gemm.received, gemm.row_ids, gemm.flags, fault, epoch,
            dispatch.rank, dispatch.max_tokens, 2 * dispatch.cols};
        load_tiles(problem, received, gemm.weights_map, storage.tiles, storage.pipeline(), scheduler,
                   warp - Config::MATH_WARPS, lane);
    } else if constexpr (!Config::IS_SPLIT) {
        push<Config>(fault, dispatch, epoch, 1, lane);
    }
}
