// Weighted top-k reduce of the expert outputs, their way to the rank of each token, and the final sums there. Gradients
// of layer 0's tokens (IS_GRADIENT) are not weighted; with them travel those of the routing weights.
//
// Tickets, their order and why it ends: kernels/layer/triton/combine.py. Here a ticket is the work of one warp. It
// lists the rows to add up, and then streams them with AHEAD loads on their way, across the ends of sums and of column
// blocks: beside a GEMM a load takes microseconds, and only what is under way in the meantime counts. A warp draws its
// next ticket when it has nothing to wait for any more: others may wait for what a ticket sends.
//
// A rank of which a wait has met its deadline sends nothing more. What this launch sums up depends on what earlier ones
// waited for and on the panel, so it is enough that no panel opens: a look at the record of faults per warp and panel,
// on its way beside the look at the panel's counter, and no register beyond it.

constexpr int BATCH = 4; // entries that a warp works on together
constexpr int SLOT_BYTES = 2 * PASS_COLS;
constexpr int LIST_ENTRIES = CHUNK * (TOP_K > WORLD ? TOP_K : WORLD);
static_assert(LIST_ENTRIES % BATCH == 0);
// Each warpgroup of each of the blocks that have a column block together tells of its part of a tile.
constexpr int SHARES_PER_TILE = 2 * BLOCK_COLS / COLS;

struct Entry {
    int row; // twice the row, plus 1 if it is the last of its sum; the row -1 adds nothing
    float weight;
};

constexpr int LIST_BYTES = LIST_ENTRIES * sizeof(Entry);

struct Returns {
    u16* y;
    const u16* landing; // partial sums of this rank's tokens
    u16* out;
    const int* row_slots;
    const float* row_weights; // of each received row and slot; their gradients, if IS_GRADIENT
    const int* send_rows;
    const int* recv_counts;
    const u64* landing_addresses;
    const float* weights_landing; // gradients of this rank's routing weights, from every rank
    const u64* weights_landing_addresses;
    float* weights_out;
    const int* flags;
    const u64* flag_addresses;
    int* tickets;
    int* panel_counters;
    const int* num_tiles;
    const int* epoch;
    Fault fault;
    int* events;
    int rank, num_tokens, max_tokens, cols, panels, parts, event_capacity;
};

// BATCH entries from shared memory.
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

// Streams the listed rows of `source`, columns first_col .. first_col + PASS_COLS * passes, through a ring in shared
// memory, and stores their sums to consecutive rows. A lane reads what it fetched itself. One warp alone is slow at
// anything that waits for itself, so entries come in batches. `started` is called with the first entries on their way.
template <int AHEAD, typename Started>
__device__ __forceinline__ void add_rows(
    u32 list, int num_entries, u32 ring, const u16* source, u16* target, int cols, int first_col, int passes, int lane,
    Started started) {
    static_assert(AHEAD % BATCH == 0);
    const int total = num_entries * passes;
    const u32 list_end = list + num_entries * sizeof(Entry);
    const u32 ring_begin = ring + lane * 16, ring_end = ring_begin + AHEAD * SLOT_BYTES;
    int fetched = 0, next_col = first_col + lane * 8;
    u32 next = list;
    const auto fetch = [&](u32 slot) {
        if (fetched < total) {
            const Batch batch(next);
#pragma unroll
            for (int place = 0; place < BATCH; ++place) {
                const int row = batch.rows[place] >> 1;
                const bool exists = row >= 0 && next_col < cols;
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             ::"r"(slot + place * SLOT_BYTES), "l"(source + (exists ? u64(row) * cols + next_col : 0)),
                             "r"(exists ? 16 : 0) : "memory");
            }
            fetched += BATCH;
            next += BATCH * sizeof(Entry);
            if (next == list_end) {
                next = list;
                next_col += PASS_COLS;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (u32 slot = ring_begin; slot < ring_end; slot += BATCH * SLOT_BYTES) fetch(slot);
    started();
    float sums[8] = {};
    u32 entry = list, slot = ring_begin;
    int col = first_col + lane * 8;
    u16* row = target;
    for (int index = 0; index < total; index += BATCH) {
        const Batch batch(entry);
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD / BATCH - 1) : "memory");
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
                const float2 values = unpack(parts[place][pair]);
                sums[2 * pair] = __fmaf_rn(values.x, batch.weights[place], sums[2 * pair]);
                sums[2 * pair + 1] = __fmaf_rn(values.y, batch.weights[place], sums[2 * pair + 1]);
            }
            if (batch.rows[place] & 1) {
                if (col < cols) {
                    *reinterpret_cast<uint4*>(row + col) = make_uint4(
                        pack(sums[0], sums[1]), pack(sums[2], sums[3]), pack(sums[4], sums[5]), pack(sums[6], sums[7]));
                }
                row += cols;
#pragma unroll
                for (int index = 0; index < 8; ++index) sums[index] = 0;
            }
        }
        fetch(slot);
        slot += BATCH * SLOT_BYTES;
        if (slot == ring_end) slot = ring_begin;
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

// One ticket: some columns of a panel of 32 rows of a source, or of 32 tokens.
struct Ticket {
    bool reduces, exists;
    int panel, flag, item, first_block, num_blocks;

    // A turn is the sums of one panel, before them the reduces of the next; the last turn has sums only.
    __device__ __forceinline__ Ticket(int number, const Returns& returns) {
        const int parts = returns.parts, panels = returns.panels;
        const int num_reduces = returns.max_tokens / CHUNK * WORLD * parts;
        const int per_panel = num_reduces + ceil_div(returns.num_tokens, CHUNK) * parts;
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
        panel_span(panel, ceil_div(returns.cols, BLOCK_COLS), panels, first_of_panel, panel_blocks);
        part_span(part, panel_blocks, parts, first_of_part, num_blocks);
        first_block = first_of_panel + first_of_part;
    }
};

// A chunk's flag, raised once the next ticket's loads are on their way: until the stores of a ticket have arrived at
// their rank, microseconds pass. Whoever waits raises it before.
struct Pending {
    int* flag = nullptr;

    __device__ __forceinline__ void raise(int epoch, int lane) {
        if (flag != nullptr) signal(flag, epoch, lane);
        flag = nullptr;
    }
};

template <int AHEAD>
struct Combiner {
    const Returns& returns;
    Entry* list;
    u32 ring;
    Recorder recorder;
    int lane, epoch, shares;
    int open_panels = 0;
    int following = 0; // of lane 0
    Pending pending;

    __device__ __forceinline__ Combiner(const Returns& returns, char* memory, int worker, int lane)
        : returns(returns), list(reinterpret_cast<Entry*>(memory)), ring(shared_address(memory) + LIST_BYTES),
          recorder(returns.events, returns.event_capacity, __ldg(returns.epoch), worker), lane(lane),
          epoch(__ldg(returns.epoch)), shares(SHARES_PER_TILE * __ldg(returns.num_tiles)) {}

    __device__ __forceinline__ void draw() {
        if (lane == 0) following = draw_ticket(returns.tickets);
    }

    __device__ __forceinline__ int chunk_flag(int rank, int row, int flag) const {
        return (rank * (returns.max_tokens / CHUNK) + row / CHUNK) * MAX_PANELS + flag;
    }

    __device__ __forceinline__ void add(const Ticket& ticket, int num_entries, const u16* source, u16* target) {
        draw();
        const int first_col = ticket.first_block * BLOCK_COLS, passes = ticket.num_blocks * (BLOCK_COLS / PASS_COLS);
        add_rows<AHEAD>(shared_address(list), num_entries, ring, source, target, returns.cols, first_col, passes, lane,
                        [&] { pending.raise(epoch, lane); });
    }

    __device__ __forceinline__ void reduce(const Ticket& ticket) {
        const u64 begin = recorder.now();
        const int rank = returns.rank, M = returns.max_tokens;
        // Sources go round the ring, so that ranks do not all send to the same one.
        const int source = (rank + 1 + ticket.item % WORLD) % WORLD, first_row = ticket.item / WORLD * CHUNK;
        const int count = source == rank ? M : __ldg(returns.recv_counts + source);
        if (first_row >= count || ticket.num_blocks == 0) return draw();
        const bool present = first_row + lane < count;
        const u64 place = u64(source * M + first_row + lane) * TOP_K;
        int rows[TOP_K];
        float weights[TOP_K];
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            rows[k] = present ? __ldg(returns.row_slots + place + k) : -1;
            weights[k] = !present ? 0 : IS_GRADIENT ? 1 : __ldg(returns.row_weights + place + k);
        }
        const int num_entries = list_rows(list, rows, weights, present, lane);
        if (ticket.panel >= open_panels) {
            pending.raise(epoch, lane);
            int first, num_blocks;
            panel_span(ticket.panel, ceil_div(returns.cols, BLOCK_COLS), returns.panels, first, num_blocks);
            const bool failed = has_failed(returns.fault);
            const bool complete = wait_flag(returns.panel_counters + ticket.panel, shares * num_blocks, returns.fault,
                                            PLACE_PANEL, rank, ticket.panel);
            // Lanes look at different moments.
            if (__any_sync(0xFFFFFFFF, failed || !complete)) return draw();
            open_panels = ticket.panel + 1;
            __syncwarp();
        }
        const u64 ready = recorder.now();
        u16* const target = reinterpret_cast<u16*>(__ldg(returns.landing_addresses + source));
        add(ticket, num_entries, returns.y, target + u64(rank * M + first_row) * returns.cols);
        if constexpr (IS_GRADIENT) {
            if (ticket.flag == 0 && present) send_weights(source, rank * M + first_row + lane, place);
        }
        int* const flags = reinterpret_cast<int*>(__ldg(returns.flag_addresses + source));
        pending.flag = flags + chunk_flag(rank, first_row, ticket.flag);
        if (lane == 0) recorder.record(KIND_REDUCE, source, first_row / CHUNK, ticket.panel, begin, ready);
    }

    // Gradients of a received row's routing weights, beside the first part of the first panel.
    __device__ __forceinline__ void send_weights(int source, int row, u64 place) const {
        float* const target = reinterpret_cast<float*>(__ldg(returns.weights_landing_addresses + source));
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) target[u64(row) * TOP_K + k] = __ldg(returns.row_weights + place + k);
    }

    __device__ __forceinline__ void sum_weights(int token, const int (&rows)[WORLD]) const {
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            float sum = 0;
#pragma unroll
            for (int peer = 0; peer < WORLD; ++peer) {
                if (rows[peer] >= 0) sum += __ldcg(returns.weights_landing + u64(rows[peer]) * TOP_K + k);
            }
            returns.weights_out[u64(token) * TOP_K + k] = sum;
        }
    }

    __device__ __forceinline__ void sum(const Ticket& ticket) {
        const u64 begin = recorder.now();
        pending.raise(epoch, lane);
        if (ticket.num_blocks == 0) return draw();
        const int token = ticket.item * CHUNK + lane;
        const bool present = token < returns.num_tokens;
        int rows[WORLD];
        float weights[WORLD];
#pragma unroll
        for (int peer = 0; peer < WORLD; ++peer) {
            const int row = present ? __ldg(returns.send_rows + u64(token) * WORLD + peer) : -1;
            rows[peer] = row < 0 ? -1 : peer * returns.max_tokens + row;
            weights[peer] = 1;
            if (row >= 0) {
                wait_flag(returns.flags + chunk_flag(peer, row, ticket.flag), epoch, returns.fault, PLACE_LAYER1, peer,
                          row / CHUNK);
            }
        }
        const int num_entries = list_rows(list, rows, weights, present, lane);
        const u64 ready = recorder.now();
        if constexpr (IS_GRADIENT) {
            if (ticket.flag == 0 && present) sum_weights(token, rows);
        }
        add(ticket, num_entries, returns.landing, returns.out + u64(ticket.item) * CHUNK * returns.cols);
        if (lane == 0) recorder.record(KIND_FINAL_SUM, ticket.item * CHUNK, CHUNK, ticket.panel, begin, ready);
    }

    __device__ __forceinline__ void run() {
        draw();
        while (true) {
            __syncwarp(); // the list is free
            const Ticket ticket(__shfl_sync(0xFFFFFFFF, following, 0), returns);
            if (!ticket.exists) break;
            if (ticket.reduces) reduce(ticket); else sum(ticket);
        }
        pending.raise(epoch, lane);
    }
};
