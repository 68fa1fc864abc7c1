// Weighted top-k reduce of the expert outputs, their way to the rank of each token, and the final sums there. As
// fc1_dgrad (IS_DGRAD) rows are not weighted; with them travel the gradients of the routing weights.
//
// Tickets, their order and why it ends: kernels/layer/triton/combine.py. Here a ticket is the work of one warp. It
// lists the rows to add up, and then streams them with AHEAD loads in flight, across the ends of sums and of column
// blocks: during a GEMM a load takes microseconds, and only loads in flight hide that. A warp takes its
// next ticket when it has nothing to wait for any more: others may wait for what a ticket sends.
//
// A rank of which a wait has met its deadline sends nothing more. What this launch sums up depends on what earlier ones
// waited for and on the panel, so it is enough that no panel opens: a look at the record of faults per warp and panel,
// loaded together with the panel's counter, and no further register.

#ifndef COMET_LAYER1_COMBINE_CUH
#define COMET_LAYER1_COMBINE_CUH

#include "../symm.cuh"
#include "tiles.cuh"

constexpr int BATCH = 4; // entries that a warp works on together

struct Entry {
    int row; // twice the row, plus 1 if it is the last of its sum; the row -1 adds nothing
    float weight;
};

// The shared memory of a combining warp: a list, and slots of a part of a row each.
template <class Config>
struct CombineShape {
    static constexpr int LIST_ENTRIES =
        Config::CHUNK * (Config::TOP_K > Config::WORLD_SIZE ? Config::TOP_K : Config::WORLD_SIZE);
    static constexpr int LIST_BYTES = LIST_ENTRIES * sizeof(Entry);
    static constexpr int SLOT_BYTES = 2 * Config::PASS_COLS;
    // Each warpgroup of each of the blocks that have a column block together counts its part of a tile.
    static constexpr int SHARES_PER_TILE = 2 * Config::PANEL_UNIT / Config::BLOCK_N;
    static_assert(LIST_ENTRIES % BATCH == 0);

    static constexpr int bytes(int ahead) { return LIST_BYTES + ahead * SLOT_BYTES; }
};

// T tokens of this rank, W ranks, M tokens at most per rank, R = W * M, K experts of a token, Q routed rows.
struct CombineArgs {
    u16* y;                     // (Q, cols) expert outputs
    const u16* received;        // (R, cols) receive buffer: partial sums of this rank's tokens
    u16* out;                   // (T, cols)
    const int* row_slots;       // (R, K) routed rows, or -1
    const float* row_weights;   // (R, K) of each received row and slot; their gradients, if IS_DGRAD
    const int* send_rows;       // (M, W) the row of each token at each rank, or -1
    const int* recv_counts;     // (W,)
    const u64* row_addresses;   // (W,) receive buffer of each rank
    const float* received_grads; // (R, K) gradients of this rank's routing weights, from every rank
    const u64* grad_addresses;  // (W,) the same buffer of each rank
    float* weight_grads;        // (T, K)
    const int* flags;           // (W, M / CHUNK, CHUNK_FLAGS)
    const u64* flag_addresses;  // (W,) flags of each rank
    int* tickets;               // counters of the launch
    int* panel_counters;        // (MAX_PANELS,)
    const int* num_plan_tiles;  // (1,)
    const int* epoch;           // (1,)
    Fault fault;
    int* events; // the recorder's, or null
    int rank, num_tokens, max_tokens, cols, panels, event_capacity;
    int parts, row_parts; // that a panel's columns, and a chunk's rows, are cut into: tickets and flags of their own
    int comm_blocks; // that combine from the start, if IS_SPLIT
};

// BATCH entries from shared storage.
struct Batch {
    int rows[BATCH];
    float weights[BATCH];

    __device__ __forceinline__ explicit Batch(u32 address) {
        static_assert(BATCH == 4);
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(rows[0]), "=f"(weights[0]), "=r"(rows[1]), "=f"(weights[1]) : "r"(address) : "memory");
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(rows[2]), "=f"(weights[2]), "=r"(rows[3]), "=f"(weights[3]) : "r"(address + 16) : "memory");
    }
};

// Streams the listed rows of `source`, columns first_col .. first_col + PASS_COLS * passes, through slots in shared
// memory, and stores their sums to consecutive rows. A lane reads what it fetched itself. One warp alone is slow at
// anything that waits for itself, so entries come in batches. `started` is called when the first entries are in flight.
template <class Config, int AHEAD, typename Started>
__device__ __forceinline__ void add_rows(
    u32 list, int num_entries, u32 slots, const u16* source, u16* target, int cols, int first_col, int passes, int lane,
    Started started) {
    using Output = typename Config::Output;
    constexpr int PASS_COLS = Config::PASS_COLS, SLOT_BYTES = CombineShape<Config>::SLOT_BYTES;
    static_assert(AHEAD % BATCH == 0);
    const int total = num_entries * passes;
    const u32 list_end = list + num_entries * sizeof(Entry);
    const u32 first_slot = slots + lane * 16, last_slot = first_slot + AHEAD * SLOT_BYTES;
    int fetched = 0, next_col = first_col + lane * 8;
    u32 next = list;
    const auto fetch = [&](u32 slot) {
        if (fetched < total) {
            const Batch batch(next);
#pragma unroll
            for (int place = 0; place < BATCH; ++place) {
                const int row = batch.rows[place] >> 1;
                const bool exists = row >= 0 && next_col < cols;
                cp_async_16(slot + place * SLOT_BYTES, source + (exists ? u64(row) * cols + next_col : 0), exists);
            }
            fetched += BATCH;
            next += BATCH * sizeof(Entry);
            if (next == list_end) {
                next = list;
                next_col += PASS_COLS;
            }
        }
        cp_async_commit_group();
    };
    for (u32 slot = first_slot; slot < last_slot; slot += BATCH * SLOT_BYTES) fetch(slot);
    started();
    float sums[8] = {};
    u32 entry = list, slot = first_slot;
    int col = first_col + lane * 8;
    u16* row = target;
    for (int index = 0; index < total; index += BATCH) {
        const Batch batch(entry);
        cp_async_wait_group<AHEAD / BATCH - 1>();
        u32 parts[BATCH][4];
#pragma unroll
        for (int place = 0; place < BATCH; ++place) {
            u32(&part)[4] = parts[place];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(part[0]), "=r"(part[1]), "=r"(part[2]), "=r"(part[3]) : "r"(slot + place * SLOT_BYTES)
                         : "memory");
        }
#pragma unroll
        for (int place = 0; place < BATCH; ++place) {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 values = Output::unpack(parts[place][pair]);
                sums[2 * pair] = __fmaf_rn(values.x, batch.weights[place], sums[2 * pair]);
                sums[2 * pair + 1] = __fmaf_rn(values.y, batch.weights[place], sums[2 * pair + 1]);
            }
            if (batch.rows[place] & 1) {
                if (col < cols) {
                    *reinterpret_cast<uint4*>(row + col) = make_uint4(
                        Output::pack(sums[0], sums[1]), Output::pack(sums[2], sums[3]),
                        Output::pack(sums[4], sums[5]), Output::pack(sums[6], sums[7]));
                }
                row += cols;
#pragma unroll
                for (int index = 0; index < 8; ++index) sums[index] = 0;
            }
        }
        fetch(slot);
        slot += BATCH * SLOT_BYTES;
        if (slot == last_slot) slot = first_slot;
        entry += BATCH * sizeof(Entry);
        if (entry == list_end) {
            entry = list;
            row = target;
            col += PASS_COLS;
        }
    }
}

// Lists MOST rows per lane, -1 where there is none, and the weights; a lane without any adds up nothing to 0. The list
// ends with entries that do nothing, up to a multiple of BATCH.
template <int MOST>
__device__ __forceinline__ int list_rows(
    Entry* list, const int (&rows)[MOST], const float (&weights)[MOST], bool present, int lane) {
    int used = 0;
#pragma unroll
    for (int place = 0; place < MOST; ++place) used += rows[place] >= 0;
    const int mine = present ? max(used, 1) : 0;
    int total;
    Entry* const own = list + before_lane(mine, lane, total);
    int entry = 0;
    if (present && used == 0) own[0] = Entry{-1, 0};
#pragma unroll
    for (int place = 0; place < MOST; ++place) {
        if (present && rows[place] >= 0) {
            own[entry] = Entry{2 * rows[place] + (entry == used - 1), weights[place]};
            ++entry;
        }
    }
    const int padded = ceil_div(total, BATCH) * BATCH;
    if (total + lane < padded) list[total + lane] = Entry{-2, 0};
    __syncwarp();
    return padded;
}

// One ticket: some columns of a panel of a chunk's rows, or of a part of them, of a source; or of as many tokens.
template <class Config>
struct CombineTicket {
    bool reduces, exists;
    int panel, flag, item, rows, first_block, num_blocks;

    // A turn is the sums of one panel, before them the reduces of the next; the last turn has sums only.
    __device__ __forceinline__ CombineTicket(int number, const CombineArgs& args) {
        const int parts = args.parts, panels = args.panels;
        rows = Config::CHUNK / args.row_parts;
        const int num_reduces = args.max_tokens / rows * Config::WORLD_SIZE * parts;
        const int per_panel = num_reduces + ceil_div(args.num_tokens, rows) * parts;
        const int turn = (number - num_reduces + per_panel) / per_panel - 1;
        item = number - num_reduces - turn * per_panel;
        reduces = turn < 0 || (item < num_reduces && turn < panels - 1);
        if (turn < 0) item = number;
        if (!reduces && turn < panels - 1) item -= num_reduces;
        panel = reduces ? turn + 1 : turn;
        exists = number < panels * per_panel;
        const int part = item % parts;
        item /= parts;
        flag = panel * parts + part;
        int panel_blocks, first_of_panel, first_of_part;
        panel_span(panel, ceil_div(args.cols, Config::PANEL_UNIT), panels, first_of_panel, panel_blocks);
        part_span(part, panel_blocks, parts, first_of_part, num_blocks);
        first_block = first_of_panel + first_of_part;
    }
};

// A chunk's flag, raised once the next ticket's loads are in flight: until the stores of a ticket have arrived at
// their rank, microseconds pass. A warp that waits raises it first.
struct PendingFlag {
    int* flag = nullptr;

    __device__ __forceinline__ void raise(int epoch, int lane) {
        if (flag != nullptr) warp_store_release(flag, epoch, lane);
        flag = nullptr;
    }
};

template <class Config, int AHEAD>
struct Combiner {
    static constexpr int TOP_K = Config::TOP_K, WORLD = Config::WORLD_SIZE, CHUNK = Config::CHUNK;
    using Shape = CombineShape<Config>;
    using Ticket = CombineTicket<Config>;

    const CombineArgs& args;
    Entry* list;
    u32 slots;
    Recorder<Config> recorder;
    int lane, epoch, shares;
    int open_panels = 0;
    int following = 0; // lane 0 has the next ticket
    PendingFlag pending;

    __device__ __forceinline__ Combiner(const CombineArgs& args, char* memory, int worker, int lane)
        : args(args), list(reinterpret_cast<Entry*>(memory)), slots(shared_address(memory) + Shape::LIST_BYTES),
          recorder(args.events, args.event_capacity, __ldg(args.epoch), worker), lane(lane),
          epoch(__ldg(args.epoch)), shares(Shape::SHARES_PER_TILE * __ldg(args.num_plan_tiles)) {}

    __device__ __forceinline__ void take_ticket() {
        if (lane == 0) following = next_ticket(args.tickets);
    }

    __device__ __forceinline__ int flag_of(int rank, int row, const Ticket& ticket) const {
        return (rank * (args.max_tokens / CHUNK) + row / CHUNK) * Config::CHUNK_FLAGS + ticket.flag * args.row_parts +
            row % CHUNK / ticket.rows;
    }

    __device__ __forceinline__ void add(const Ticket& ticket, int num_entries, const u16* source, u16* target) {
        take_ticket();
        constexpr int UNIT = Config::PANEL_UNIT;
        const int first_col = ticket.first_block * UNIT, passes = ticket.num_blocks * (UNIT / Config::PASS_COLS);
        add_rows<Config, AHEAD>(shared_address(list), num_entries, slots, source, target, args.cols, first_col, passes,
                                lane, [&] { pending.raise(epoch, lane); });
    }

    __device__ __forceinline__ void reduce(const Ticket& ticket) {
        const u64 begin = recorder.now();
        const int rank = args.rank, M = args.max_tokens;
        // Sources go round the ring, so that ranks do not all send to the same one.
        const int source = (rank + 1 + ticket.item % WORLD) % WORLD, first_row = ticket.item / WORLD * ticket.rows;
        const int count = source == rank ? M : __ldg(args.recv_counts + source);
        if (first_row >= count || ticket.num_blocks == 0) return take_ticket();
        const bool present = lane < ticket.rows && first_row + lane < count;
        const u64 place = u64(source * M + first_row + lane) * TOP_K;
        int rows[TOP_K];
        float weights[TOP_K];
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            rows[k] = present ? __ldg(args.row_slots + place + k) : -1;
            weights[k] = !present ? 0 : Config::IS_DGRAD ? 1 : __ldg(args.row_weights + place + k);
        }
        const int num_entries = list_rows(list, rows, weights, present, lane);
        if (ticket.panel >= open_panels) {
            pending.raise(epoch, lane);
            int first, num_blocks;
            panel_span(ticket.panel, ceil_div(args.cols, Config::PANEL_UNIT), args.panels, first, num_blocks);
            const bool failed = has_failed(args.fault);
            const bool complete = wait_flag(args.panel_counters + ticket.panel, shares * num_blocks, args.fault,
                                            Config::PLACE_PANEL, rank, ticket.panel);
            // Lanes look at different moments.
            if (__any_sync(ALL_LANES, failed || !complete)) return take_ticket();
            open_panels = ticket.panel + 1;
            __syncwarp();
        }
        const u64 ready = recorder.now();
        u16* const target = reinterpret_cast<u16*>(__ldg(args.row_addresses + source));
        add(ticket, num_entries, args.y, target + u64(rank * M + first_row) * args.cols);
        if constexpr (Config::IS_DGRAD) {
            if (ticket.flag == 0 && present) send_weights(source, rank * M + first_row + lane, place);
        }
        int* const flags = reinterpret_cast<int*>(__ldg(args.flag_addresses + source));
        pending.flag = flags + flag_of(rank, first_row, ticket);
        if (lane == 0) recorder.record(Config::KIND_REDUCE, source, first_row / CHUNK, ticket.panel, begin, ready);
    }

    // Sends the gradients of a received row's routing weights, with the first part of the first panel.
    __device__ __forceinline__ void send_weights(int source, int row, u64 place) const {
        float* const target = reinterpret_cast<float*>(__ldg(args.grad_addresses + source));
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) target[u64(row) * TOP_K + k] = __ldg(args.row_weights + place + k);
    }

    __device__ __forceinline__ void sum_weights(int token, const int (&rows)[WORLD]) const {
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            float sum = 0;
#pragma unroll
            for (int peer = 0; peer < WORLD; ++peer) {
                if (rows[peer] >= 0) sum += __ldcg(args.received_grads + u64(rows[peer]) * TOP_K + k);
            }
            args.weight_grads[u64(token) * TOP_K + k] = sum;
        }
    }

    __device__ __forceinline__ void sum(const Ticket& ticket) {
        const u64 begin = recorder.now();
        pending.raise(epoch, lane);
        if (ticket.num_blocks == 0) return take_ticket();
        const int first_token = ticket.item * ticket.rows, token = first_token + lane;
        const bool present = lane < ticket.rows && token < args.num_tokens;
        int rows[WORLD];
        float weights[WORLD];
#pragma unroll
        for (int peer = 0; peer < WORLD; ++peer) {
            const int row = present ? __ldg(args.send_rows + u64(token) * WORLD + peer) : -1;
            rows[peer] = row < 0 ? -1 : peer * args.max_tokens + row;
            weights[peer] = 1;
            if (row >= 0) {
                wait_flag(args.flags + flag_of(peer, row, ticket), epoch, args.fault, Config::PLACE_LAYER1,
                          peer, row / CHUNK);
            }
        }
        const int num_entries = list_rows(list, rows, weights, present, lane);
        const u64 ready = recorder.now();
        if constexpr (Config::IS_DGRAD) {
            if (ticket.flag == 0 && present) sum_weights(token, rows);
        }
        add(ticket, num_entries, args.received, args.out + u64(first_token) * args.cols);
        if (lane == 0) recorder.record(Config::KIND_FINAL_SUM, first_token, ticket.rows, ticket.panel, begin, ready);
    }

    __device__ __forceinline__ void run() {
        take_ticket();
        while (true) {
            __syncwarp(); // the list is free
            const Ticket ticket(__shfl_sync(ALL_LANES, following, 0), args);
            if (!ticket.exists) break;
            if (ticket.reduces) reduce(ticket); else sum(ticket);
        }
        pending.raise(epoch, lane);
    }
};

#endif
