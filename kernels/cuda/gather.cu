// The work items of layer 0's GEMM, hidden[q] = swiglu(w[expert of q] @ row[q]) for all routed rows, whose tokens lie
// anywhere in x (own rows) or among the received rows; as hidden's gradient (IS_GRADIENT) of hidden[q] = row[q] @
// w[expert of q], where rows are gradients of layer 1's output.
//
// Three warps load: rows in pieces of 16 bytes per lane, for a bulk copy of a single row of 128 bytes takes 66 cycles;
// weights by bulk copies, in eights of gate rows and up rows in turn, so that gate and up of a column of hidden meet in
// one thread.

constexpr int HIDDEN_COLS = IS_GRADIENT ? COLS : COLS / 2; // of an item
constexpr int ELEMENT_BYTES = LINE / DEPTH;
constexpr int LOADED_ROWS = 16; // a group: what a loading warp has one after the other
constexpr int ROWS_PER_LOAD = 32 * 16 / LINE; // of a warp
constexpr int LOADS_PER_GROUP = LOADED_ROWS / ROWS_PER_LOAD;
constexpr int MOST_LOADS = (MOST_ROWS / LOADED_ROWS + LOADERS - 1) / LOADERS * LOADS_PER_GROUP; // of a warp and stage
constexpr int UNROLLED = 4; // steps of the loading warps
constexpr int LOOK_STEP = 2; // from which it is seen whether the next item's rows are there
constexpr int IDS_PER_LANE = (MOST_LOADS + 7) / 8;
static_assert(CLUSTER == 1 && STEP % LOADED_ROWS == 0 && UNROLLED % SCALE_STEPS == 0);
static_assert(!IS_FP8 || ROW_SCALE_BYTES == 16); // what cp.async.cg copies

struct Arrivals {
    const char* own; // tokens of this rank
    const char* received;
    const int* row_ids; // received row of each routed row
    const int* flags;   // of each chunk of received rows
    Fault fault;
    int epoch, rank, max_tokens, row_bytes;

    __device__ __forceinline__ bool is_own(int id) const { return u32(id - rank * max_tokens) < u32(max_tokens); }

    __device__ __forceinline__ const char* row(int id) const {
        return is_own(id) ? own + u64(id - rank * max_tokens) * row_bytes : received + u64(id) * row_bytes;
    }
};

// ---- work items

// An expert's rows in two parts: some that are there from the start, so that nothing waits for the first rows of
// others, and the rest; both are cut into pieces. All first parts come first.
struct Parts {
    int* first_piece; // 2 * experts + 1 in shared memory: pieces before each part
    int* first_rows;  // experts: rows of the first part
};

struct Work {
    const int* counts; // routed rows of each expert
    const int* starts; // first routed row of each expert
    Parts parts;
    int experts, depth, ffn;

    __device__ __forceinline__ int items_per_piece() const { return ceil_div(ffn, HIDDEN_COLS); }
    __device__ __forceinline__ int num_items() const { return parts.first_piece[2 * experts] * items_per_piece(); }
    __device__ __forceinline__ int num_steps() const { return ceil_div(depth, DEPTH); }
};

// What the first loading warp tells the warpgroups about an item, in shared memory; `rows` is a multiple of STEP, of
// which `valid` are routed rows.
struct alignas(16) Item {
    int first_row, rows, valid, col, expert, phase, is_last, spare;
    u64 begin, ready; // nanoseconds
};

static_assert(sizeof(Item) == 48 && ITEM_SLOTS > STAGES + 2);

__device__ __forceinline__ Item item_at(const Work& work, int index) {
    Item item = {};
    const int piece = index / work.items_per_piece();
    const int* const first_piece = work.parts.first_piece;
    const int part = part_of(first_piece, 2 * work.experts, piece);
    const bool is_first = part < work.experts;
    item.phase = !is_first;
    item.expert = is_first ? part : part - work.experts;
    const int num = first_piece[part + 1] - first_piece[part];
    const Place place(index - first_piece[part] * work.items_per_piece(), num, work.items_per_piece());
    item.col = place.col * HIDDEN_COLS;
    const int first = work.parts.first_rows[item.expert];
    const int count = is_first ? first : __ldg(work.counts + item.expert) - first;
    const int height = piece_height(count, num);
    item.first_row = __ldg(work.starts + item.expert) + (is_first ? 0 : first) + place.piece * height;
    item.valid = min(height, count - place.piece * height);
    item.rows = ceil_div(item.valid, STEP) * STEP;
    return item;
}

// Cuts the experts' rows. First parts are tiles of phase 0, as many as keep every block busy once. The work of all
// threads of a block; `tiles` go by phase.
__device__ __forceinline__ void list_pieces(
    const Work& work, const int4* tiles, int num_tiles, int thread, int num_threads) {
    const int experts = work.experts;
    int* const first_rows = work.parts.first_rows;
    for (int expert = thread; expert < experts; expert += num_threads) first_rows[expert] = 0;
    __syncthreads();
    for (int tile = thread; tile < num_tiles; tile += num_threads) {
        const int4 entry = __ldg(tiles + tile);
        if (entry.w == 0) atomicAdd(first_rows + entry.x, entry.z);
    }
    __syncthreads();
    if (thread >= 32) return;
    const int enough = ceil_div(gridDim.x, work.items_per_piece());
    int before = 0;
    for (int second = 0; second < 2; ++second) {
        for (int begin = 0; begin < experts; begin += 32) {
            const int expert = begin + thread;
            const int first = expert < experts ? first_rows[expert] : 0;
            const int count = expert >= experts ? 0 : second ? __ldg(work.counts + expert) - first : first;
            int pieces = pieces_of(count), total;
            int earlier = before_lane(pieces, thread, total);
            if (!second && expert < experts) {
                const int kept = min(pieces, max(enough - before - earlier, 0));
                if (kept < pieces) first_rows[expert] = kept * MOST_AT_ONCE;
                pieces = kept;
            }
            earlier = before_lane(pieces, thread, total);
            if (expert < experts) work.parts.first_piece[second * experts + expert] = before + earlier;
            before += total;
        }
        __syncwarp();
    }
    if (thread == 0) work.parts.first_piece[2 * experts] = before;
}

// ---- roles

// The received rows of an item that a warp loads from. The rows go to the loading warps in turn; the eight lanes
// that load a row together keep the ids of their rows between them.
struct Rows {
    int ids[IDS_PER_LANE];

    // Of the item, and for the first eight lanes.
    static __device__ __forceinline__ int row_at(int load, int loader) {
        return (load / LOADS_PER_GROUP * LOADERS + loader) * LOADED_ROWS + load % LOADS_PER_GROUP * ROWS_PER_LOAD;
    }

    __device__ __forceinline__ void fetch(const Item& item, const int* row_ids, int loader, int lane) {
#pragma unroll
        for (int eight = 0; eight < IDS_PER_LANE; ++eight) {
            // Rows past the last read the first one: no one reads the result.
            const int row = row_at(8 * eight + lane % 8, loader) + lane / 8;
            ids[eight] = __ldg(row_ids + item.first_row + (row < item.valid ? row : 0));
        }
    }

    __device__ __forceinline__ int id_of(int load, int lane) const {
        return __shfl_sync(0xFFFFFFFF, ids[load / 8], lane / 8 * 8 + load % 8);
    }

    // Whether the row of one of a lane's ids is there.
    __device__ __forceinline__ bool look(int eight, const Arrivals& arrivals) const {
        const int id = ids[eight];
        return arrivals.is_own(id) || seen_at(arrivals.flags + id / CHUNK) >= arrivals.epoch;
    }

    __device__ __forceinline__ void wait(const Arrivals& arrivals) const {
        const u64 end = now_ns() + arrivals.fault.timeout_ns;
        while (true) {
            bool arrived = true;
#pragma unroll
            for (int eight = 0; eight < IDS_PER_LANE; ++eight) arrived &= look(eight, arrivals);
            if (__all_sync(0xFFFFFFFF, arrived)) break;
            // Lanes look at different moments, and leave together.
            if (!__any_sync(0xFFFFFFFF, has_failed(arrivals.fault) || now_ns() > end)) continue;
            for (const int id : ids) name_missing(id, arrivals);
            break;
        }
    }

    static __device__ __forceinline__ void name_missing(int id, const Arrivals& arrivals) {
        if (arrivals.is_own(id)) return;
        const int source = id / arrivals.max_tokens, chunk = id % arrivals.max_tokens / CHUNK;
        const Fault at_once{arrivals.fault.record, 0};
        wait_flag(arrivals.flags + id / CHUNK, arrivals.epoch, at_once, PLACE_LAYER0, source, chunk);
    }
};

// Where a lane finds the scales of some of its warp's rows, in block FP8: behind a row's elements, one for each step. A
// row's bytes are a multiple of 64, so those of the last few steps may be followed by others that no one reads.
struct RowScales {
    const char* from[IDS_PER_LANE];

    __device__ __forceinline__ void find(const Rows& rows, const Arrivals& arrivals, int depth, int lane) {
#pragma unroll
        for (int eight = 0; eight < IDS_PER_LANE; ++eight) {
            // Of row `lane` of 32 that the warp loads in eight turns.
            const int id = __shfl_sync(0xFFFFFFFF, rows.ids[eight], lane % 4 * 8 + lane / 4);
            from[eight] = arrivals.row(id) + depth * ELEMENT_BYTES;
        }
    }

    __device__ __forceinline__ void load(u32 scales, int step, int loader, int lane) const {
#pragma unroll
        for (int eight = 0; eight < IDS_PER_LANE; ++eight) {
            const int row = Rows::row_at(8 * eight + lane / 4, loader) + lane % 4;
            if (row >= MOST_ROWS) continue;
            asm volatile("cp.async.cg.shared.global [%0], [%1], %2;"
                         ::"r"(scales + ROW_SCALE_BYTES * row), "l"(from[eight] + 4 * step), "n"(ROW_SCALE_BYTES)
                         : "memory");
        }
    }
};

// Stages that a lane has loads on their way to. Tensor cores see what threads have written once these have fenced it,
// so the lanes tell that a stage is full, when they have loads for LAG more on their way.
struct Underway {
    static constexpr int LAG = 1;
    static_assert(LAG + 1 < STAGES); // those that multiply keep a stage while they wait for the next one
    int stages = 0;

    __device__ __forceinline__ void tell(const Ring& ring, int before) const {
        barrier_arrive_here(ring.full + 8 * ((ring.stage + STAGES - before) % STAGES));
    }

    // After the loads for the ring's stage.
    __device__ __forceinline__ void add(const Ring& ring) {
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (stages < LAG) {
            ++stages;
            return;
        }
        asm volatile("cp.async.wait_group %0;" ::"n"(LAG) : "memory");
        fence_for_tensor_cores();
        tell(ring, LAG);
    }

    // The ring is at the stage after the last one.
    __device__ __forceinline__ void finish(const Ring& ring) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        fence_for_tensor_cores();
        for (int before = stages; before > 0; --before) tell(ring, before);
        stages = 0;
    }
};

// One step's part of the rows: 16 bytes per lane and load, zeros where a lane is not `inside`. Written for few
// instructions: a warp alone has time for about four per load.
template <bool FULL>
__device__ __forceinline__ void load_rows(
    u32 even, u32 odd, const char* const (&from)[MOST_LOADS], int offset, int num_groups, bool inside) {
#pragma unroll
    for (int group = 0; group < MOST_LOADS / LOADS_PER_GROUP; ++group) {
        if (group >= num_groups) break;
#pragma unroll
        for (int place = 0; place < LOADS_PER_GROUP; ++place) {
            const int row = group * LOADERS * LOADED_ROWS + place * ROWS_PER_LOAD;
            const u32 target = (place % 2 ? odd : even) + row * LINE;
            const char* const source = from[group * LOADS_PER_GROUP + place] + offset;
            if constexpr (FULL) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
            } else {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                             ::"r"(target), "l"(source), "r"(inside ? 16 : 0) : "memory");
            }
        }
    }
}

__device__ __forceinline__ void load_items(
    const Work& work, const Arrivals& arrivals, const TensorMap& weights_map, const Memory<Item>& memory, Draws& draws,
    int loader, int lane) {
    const int num_items = work.num_items(), num_steps = work.num_steps(), first = draws.first();
    if (first >= num_items) return;
    Ring ring = memory.ring();
    // Rows of 128 bytes are swizzled in groups of eight; a load has four rows.
    const u32 even = lane / 8 * LINE + ((lane % 8 ^ lane / 8) << 4), odd = even ^ (4 << 4);
    Item next = item_at(work, first);
    Rows rows;
    rows.fetch(next, arrivals.row_ids, loader, lane);
    Underway underway;
    bool arrived = false;
    for (bool is_last = false; !is_last;) {
        Item item = next;
        const int following = draws.next();
        item.is_last = is_last = following >= num_items;
        if constexpr (RECORDS) item.begin = now_ns();
        if (!__all_sync(0xFFFFFFFF, arrived)) {
            if constexpr (FENCED_BY_LOADERS) underway.finish(ring);
            rows.wait(arrivals);
        }
        __syncwarp(); // a row is loaded by lanes beside the one that has seen its flag
        if constexpr (RECORDS) item.ready = now_ns();
        if (draws.leads) memory.items[draws.slot()] = item; // seen by whoever has waited for the item's first stage
        const char* from[MOST_LOADS];
#pragma unroll
        for (int load = 0; load < MOST_LOADS; ++load) {
            from[load] = arrivals.row(rows.id_of(load, lane)) + lane % 8 * 16;
        }
        RowScales scales;
        if constexpr (IS_FP8) scales.find(rows, arrivals, work.depth, lane);
        const int num_groups = (item.rows / LOADED_ROWS - loader + LOADERS - 1) / LOADERS;
        arrived = num_steps >= LOOK_STEP + IDS_PER_LANE;
        // The next item's rows are found while this one's are loaded.
        if (!is_last) {
            next = item_at(work, following);
            rows.fetch(next, arrivals.row_ids, loader, lane);
        }
        draws.tell(is_last);
        for (int begin = 0; begin < num_steps; begin += UNROLLED) {
#pragma unroll
            for (int unrolled = 0; unrolled < UNROLLED; ++unrolled) {
                const int step = begin + unrolled;
                if (step >= num_steps) break;
                // A look takes a microsecond, which is hidden while the ring is full: one per step.
                if (!is_last) {
#pragma unroll
                    for (int eight = 0; eight < IDS_PER_LANE; ++eight) {
                        if (step == LOOK_STEP + eight) arrived &= rows.look(eight, arrivals);
                    }
                }
                barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
                const u32 weights = ring.stages + ring.stage * STAGE_BYTES, ready = ring.full + 8 * ring.stage;
                if (draws.leads) {
                    barrier_expect(ready, WEIGHT_BYTES);
                    if constexpr (IS_GRADIENT) {
                        load_columns(weights, weights_map, ready, step * DEPTH, item.col, item.expert);
                    } else {
                        load_gate_up(weights, weights_map, ready, step * DEPTH, item.col / 8, item.expert);
                    }
                }
                const u32 target = weights + WEIGHT_BYTES + loader * LOADED_ROWS * LINE;
                if ((step + 1) * DEPTH <= work.depth) {
                    load_rows<true>(target + even, target + odd, from, unrolled * LINE, num_groups, true);
                } else {
                    const bool inside = step * DEPTH + lane % 8 * (16 / ELEMENT_BYTES) < work.depth;
                    const int offset = inside ? unrolled * LINE : 0;
                    load_rows<false>(target + even, target + odd, from, offset, num_groups, inside);
                }
                if constexpr (IS_FP8) {
                    if (unrolled % SCALE_STEPS == 0) scales.load(ring.scales(step), step, loader, lane);
                    ring.advance_scales(step, num_steps);
                }
                if constexpr (FENCED_BY_LOADERS) {
                    underway.add(ring);
                } else {
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ready) : "memory");
                }
                ring.advance();
            }
#pragma unroll
            for (int load = 0; load < MOST_LOADS; ++load) from[load] += UNROLLED * LINE;
        }
    }
    if constexpr (FENCED_BY_LOADERS) underway.finish(ring);
}
