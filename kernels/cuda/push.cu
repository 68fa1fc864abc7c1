// Token rows on their way to the ranks that compute them; order and flags: kernels/layer/triton/dispatch.py. Here a
// ticket is the work of one warp: PUSH_ROWS rows of a chunk. Whoever moves the last of a chunk raises its flag. Nobody
// waits. A rank that has failed has nothing to send: its plan says so (kernels/plan/placement.py), and between plan and
// launch none waits.

static_assert(PUSH_ROWS < 32);

struct Sends {
    const u16* x;
    const int* token_ids;
    const int* counts;
    const u64* row_addresses;
    const u64* flag_addresses;
    int* tickets;
    int* pushed; // tickets done of each (rank, chunk)
    const int* epoch;
    int* events;
    int rank, max_tokens, cols, event_capacity;
};

// Tickets of a chunk that were done. A flag is raised once all of them are, and a ticket counts when the next one's
// loads are on their way: until its stores have arrived at their rank, microseconds pass.
struct Pending {
    int* done = nullptr;
    int* flag;
    int all;

    __device__ __forceinline__ void tell(int epoch, int lane) {
        __syncwarp();
        if (lane == 0 && done != nullptr) {
            fence_release();
            if (atomicAdd(done, 1) == all - 1) raise_flag(flag, epoch);
        }
        done = nullptr;
    }
};

// Copies rows `first` to `last` of a send list, with PUSH_BATCH loads of 16 bytes per lane on their way, of which the
// first are when `started` is called.
template <typename Started>
__device__ __forceinline__ void copy_rows(
    const u16* x, const int* token_ids, u16* target, int first, int last, int cols, int lane, Started started) {
    const int own_token = first + lane < last ? __ldg(token_ids + first + lane) : -1;
    const int passes = ceil_div(cols, PASS_COLS), total = (last - first) * passes;
    int row = 0, pass = 0;
    for (int begin = 0; begin < total; begin += PUSH_BATCH) {
        uint4 values[PUSH_BATCH];
        u16* places[PUSH_BATCH];
#pragma unroll
        for (int piece = 0; piece < PUSH_BATCH; ++piece) {
            const int token = __shfl_sync(0xFFFFFFFF, own_token, row), col = pass * PASS_COLS + lane * 8;
            const bool exists = token >= 0 && col < cols;
            places[piece] = exists ? target + u64(first + row) * cols + col : nullptr;
            if (exists) values[piece] = __ldg(reinterpret_cast<const uint4*>(x + u64(token) * cols + col));
            if (++pass == passes) {
                pass = 0;
                row = min(row + 1, 31); // past the end there is no token
            }
        }
        if (begin == 0) started();
#pragma unroll
        for (int piece = 0; piece < PUSH_BATCH; ++piece) {
            if (places[piece] != nullptr) *reinterpret_cast<uint4*>(places[piece]) = values[piece];
        }
    }
}

__device__ __forceinline__ void push_rows(const Sends& sends, const Recorder& recorder, int lane) {
    constexpr int TARGETS = WORLD > 1 ? WORLD - 1 : 1, PER_CHUNK = CHUNK / PUSH_ROWS;
    const int M = sends.max_tokens, rank = sends.rank, epoch = __ldg(sends.epoch), num_chunks = M / CHUNK;
    Pending pending;
    int following = 0; // of lane 0
    const auto draw = [&] { if (lane == 0) following = draw_ticket(sends.tickets); };
    draw();
    while (true) {
        const int ticket = __shfl_sync(0xFFFFFFFF, following, 0);
        draw();
        if (ticket >= (WORLD - 1) * num_chunks * PER_CHUNK) break;
        const u64 begin = recorder.now();
        const int hop = ticket / PER_CHUNK % TARGETS, chunk = ticket / PER_CHUNK / TARGETS;
        const int target = (rank + WORLD - 1 - hop) % WORLD, count = __ldg(sends.counts + target);
        const int first = chunk * CHUNK + ticket % PER_CHUNK * PUSH_ROWS;
        if (first >= count) continue;
        u16* const rows = reinterpret_cast<u16*>(__ldg(sends.row_addresses + target)) + u64(rank) * M * sends.cols;
        copy_rows(sends.x, sends.token_ids + u64(target) * M, rows, first, min(first + PUSH_ROWS, count), sends.cols,
                  lane, [&] { pending.tell(epoch, lane); });
        pending.done = sends.pushed + target * num_chunks + chunk;
        pending.flag = reinterpret_cast<int*>(__ldg(sends.flag_addresses + target)) + rank * num_chunks + chunk;
        pending.all = ceil_div(min(CHUNK, count - chunk * CHUNK), PUSH_ROWS);
        if (lane == 0) recorder.record(KIND_DISPATCH, target, chunk, 0, begin, begin);
    }
    pending.tell(epoch, lane);
}
