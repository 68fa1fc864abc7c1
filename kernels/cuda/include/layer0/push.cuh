// Pushes token rows to the ranks that compute them; order and flags: kernels/layer/triton/dispatch.py. Here a ticket
// is the work of one warp: PUSH_ROWS rows of a chunk. The warp that moves the last rows of a chunk raises its flag. No
// warp waits. A rank that has failed has nothing to send: its plan says so (kernels/plan/placement.py), and between
// plan and launch none waits.

#ifndef COMET_LAYER0_PUSH_CUH
#define COMET_LAYER0_PUSH_CUH

#include "../gemm/scheduler.cuh"
#include "../symm.cuh"

// Arguments of the dispatch warps: T tokens of `cols` 16-bit words, W ranks, M tokens at most per rank.
struct DispatchArgs {
    const u16* x;              // (T, cols)
    const int* token_ids;      // (W, M) tokens of each send list
    const int* counts;         // (W,) lengths of the send lists
    const u64* row_addresses;  // (W,) receive buffer of each rank
    const u64* flag_addresses; // (W,) its flags
    int* tickets;              // counters of the launch
    int* pushed;               // (W, M / CHUNK) tickets done
    const int* epoch;          // (1,)
    int* events;               // the recorder's, or null
    int rank, max_tokens, cols, event_capacity;
    int comm_blocks; // that push first, if IS_SPLIT
};

// Tickets of a chunk that were done. A flag is raised once all of them are, and a ticket counts when the next one's
// loads are in flight: until its stores have arrived at their rank, microseconds pass.
struct PendingPush {
    int* done = nullptr;
    int* flag;
    int all;

    __device__ __forceinline__ void finish(int epoch, int lane) {
        __syncwarp();
        if (lane == 0 && done != nullptr) {
            fence_release();
            if (atomicAdd(done, 1) == all - 1) store_release(flag, epoch);
        }
        done = nullptr;
    }
};

// Copies rows `first` to `last` of a send list, with PUSH_BATCH loads of 16 bytes per lane in flight; `started` is
// called once the first ones are.
template <class Config, typename Started>
__device__ __forceinline__ void copy_rows(
    const u16* x, const int* token_ids, u16* target, int first, int last, int cols, int lane, Started started) {
    constexpr int BATCH = Config::PUSH_BATCH;
    const int own_token = first + lane < last ? __ldg(token_ids + first + lane) : -1;
    const int passes = ceil_div(cols, Config::PASS_COLS), total = (last - first) * passes;
    int row = 0, pass = 0;
    for (int begin = 0; begin < total; begin += BATCH) {
        uint4 values[BATCH];
        u16* places[BATCH];
#pragma unroll
        for (int index = 0; index < BATCH; ++index) {
            const int token = __shfl_sync(ALL_LANES, own_token, row), col = pass * Config::PASS_COLS + lane * 8;
            const bool exists = token >= 0 && col < cols;
            places[index] = exists ? target + u64(first + row) * cols + col : nullptr;
            if (exists) values[index] = __ldg(reinterpret_cast<const uint4*>(x + u64(token) * cols + col));
            if (++pass == passes) {
                pass = 0;
                row = min(row + 1, 31); // past the end there is no token
            }
        }
        if (begin == 0) started();
#pragma unroll
        for (int index = 0; index < BATCH; ++index) {
            if (places[index] != nullptr) *reinterpret_cast<uint4*>(places[index]) = values[index];
        }
    }
}

template <class Config>
__device__ __forceinline__ void push_rows(const DispatchArgs& args, const Recorder<Config>& recorder, int lane) {
    constexpr int WORLD = Config::WORLD_SIZE, CHUNK = Config::CHUNK, PUSH_ROWS = Config::PUSH_ROWS;
    constexpr int TARGETS = WORLD > 1 ? WORLD - 1 : 1, PER_CHUNK = CHUNK / PUSH_ROWS;
    static_assert(PUSH_ROWS < 32);
    const int M = args.max_tokens, rank = args.rank, epoch = __ldg(args.epoch), num_chunks = M / CHUNK;
    PendingPush pending;
    int following = 0; // lane 0 has the next ticket
    const auto take_ticket = [&] { if (lane == 0) following = next_ticket(args.tickets); };
    take_ticket();
    while (true) {
        const int ticket = __shfl_sync(ALL_LANES, following, 0);
        take_ticket();
        if (ticket >= (WORLD - 1) * num_chunks * PER_CHUNK) break;
        const u64 begin = recorder.now();
        const int hop = ticket / PER_CHUNK % TARGETS, chunk = ticket / PER_CHUNK / TARGETS;
        const int target = (rank + WORLD - 1 - hop) % WORLD, count = __ldg(args.counts + target);
        const int first = chunk * CHUNK + ticket % PER_CHUNK * PUSH_ROWS;
        if (first >= count) continue;
        u16* const rows = reinterpret_cast<u16*>(__ldg(args.row_addresses + target)) + u64(rank) * M * args.cols;
        copy_rows<Config>(args.x, args.token_ids + u64(target) * M, rows, first, min(first + PUSH_ROWS, count),
                          args.cols, lane, [&] { pending.finish(epoch, lane); });
        pending.done = args.pushed + target * num_chunks + chunk;
        pending.flag = reinterpret_cast<int*>(__ldg(args.flag_addresses + target)) + rank * num_chunks + chunk;
        pending.all = ceil_div(min(CHUNK, count - chunk * CHUNK), PUSH_ROWS);
        if (lane == 0) recorder.record(Config::KIND_DISPATCH, target, chunk, 0, begin, begin);
    }
    pending.finish(epoch, lane);
}

#endif
