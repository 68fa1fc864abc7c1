// The work items of layer 1's GEMM, y[q] = w[expert of q] @ a[q] for all routed rows, column panel by column panel; as
// the gradients of layer 0's tokens (IS_GRADIENT) of y[q] = a[q] @ w[expert of q].
//
// One warp loads. CLUSTER blocks have neighbouring columns of the same rows: each fetches its own weights and a part of
// the rows, which the copies hand to all of them.

static_assert(MOST_ROWS % BOX_ROWS == 0 && STEP % 16 == 0);

// ---- work items

// See part_span, panel_of and panel_span of kernels/gemm/tiles.py.
__device__ __forceinline__ void part_span(int part, int elements, int parts, int& first, int& width) {
    const int narrow = elements / parts, wide = elements % parts;
    first = part * narrow + min(part, wide);
    width = narrow + (part < wide);
}

__device__ __forceinline__ void panel_span(int panel, int cols, int panels, int& first, int& width) {
    const int last = panels > 1 ? max(cols / (2 * panels), 1) : cols;
    if (panel == panels - 1) {
        first = cols - last;
        width = last;
    } else {
        part_span(panel, cols - last, panels - 1, first, width);
    }
}

// Of block FP8; see gemm_combine of kernels/layer/triton/gemm_combine.py.
struct Scales {
    const float* rows;    // (F / 128, routed_rows)
    const float* weights; // (experts, D / 128, F / 128)
    s64 routed_rows;
};

struct Work {
    const int* counts;      // routed rows of each expert
    const int* starts;      // first routed row of each expert
    const int* first_piece; // in shared memory: pieces before each expert
    int experts, depth, cols, panels, rank;
    Scales scales;

    __device__ __forceinline__ int num_pieces() const { return first_piece[experts]; }
    __device__ __forceinline__ int num_cols() const { return ceil_div(cols, BLOCK_COLS); }
    __device__ __forceinline__ int num_items() const {
        return num_pieces() * num_cols() * (BLOCK_COLS / COLS / CLUSTER);
    }
    __device__ __forceinline__ int num_steps() const { return ceil_div(depth, DEPTH); }
};

// What the loading warp tells the warpgroups about an item, in shared memory.
struct alignas(16) Item {
    int first_row, rows, col, panel, tiles, expert, is_last;
};

static_assert(sizeof(Item) == 32 && ITEM_SLOTS > STAGES + 2);

// Panels from left to right, in each all pieces of rows. `rows` is a multiple of STEP; `tiles` says for how many of the
// plan's tiles the item counts.
__device__ __forceinline__ Item item_at(const Work& work, int index) {
    const int per_col = BLOCK_COLS / COLS / CLUSTER;
    const int pieces = work.num_pieces(), cols = work.num_cols();
    Item item;
    int first = 0, width = 0;
    for (item.panel = 0; item.panel < work.panels; ++item.panel) {
        panel_span(item.panel, cols, work.panels, first, width);
        if (index < (first + width) * per_col * pieces) break;
    }
    index -= first * per_col * pieces;
    const int piece = index / (width * per_col);
    const int expert = item.expert = part_of(work.first_piece, work.experts, piece);
    const int num = work.first_piece[expert + 1] - work.first_piece[expert];
    const Place place(index - work.first_piece[expert] * (width * per_col), num, width * per_col);
    item.col = ((first * per_col + place.col) * CLUSTER + work.rank) * COLS;
    const int count = __ldg(work.counts + expert), tiles = ceil_div(count, TILE_ROWS);
    const int height = piece_height(count, num);
    item.first_row = __ldg(work.starts + expert) + place.piece * height;
    // Heights are rounded up, so the last piece may be lower than the others; it has at least one step.
    item.rows = max(min(height, ceil_div(count - place.piece * height, STEP) * STEP), STEP);
    item.tiles = (place.piece + 1) * tiles / num - place.piece * tiles / num;
    return item;
}

// ---- roles

__device__ __forceinline__ void load_items(
    const Work& work, const TensorMap& rows_map, const TensorMap& weights_map, const Memory<Item>& memory,
    Draws& draws) {
    Ring ring = memory.ring();
    const int num_items = work.num_items();
    for (int index = draws.first(), following; index < num_items; index = following) {
        Item item = item_at(work, index);
        following = draws.next();
        item.is_last = following >= num_items;
        memory.items[draws.slot()] = item; // seen by whoever has waited for the item's first stage
        draws.tell(item.is_last);
        const int boxes = ceil_div(item.rows, BOX_ROWS);
        for (int step = 0; step < work.num_steps(); ++step) {
            barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            const u32 weights = ring.stages + ring.stage * STAGE_BYTES, rows = weights + WEIGHT_BYTES;
            const u32 ready = ring.full + 8 * ring.stage;
            barrier_expect(ready, WEIGHT_BYTES + boxes * BOX_ROWS * LINE + (IS_FP8 ? 4 * item.rows : 0));
            if constexpr (IS_GRADIENT) {
                load_columns(weights, weights_map, ready, step * DEPTH, item.col, item.expert);
            } else {
                load_weights(weights, weights_map, ready, step * DEPTH, item.col, item.expert);
            }
            for (int box = work.rank; box < boxes; box += CLUSTER) {
                load_rows(
                    rows + box * BOX_ROWS * LINE, rows_map, ready, step * DEPTH, item.first_row + box * BOX_ROWS);
            }
            if constexpr (IS_FP8) {
                const float* const scales = work.scales.rows + step * work.scales.routed_rows + item.first_row;
                load_bytes(ring.scales(step), scales, ready, 4 * item.rows);
                ring.advance_scales(step, work.num_steps());
            }
            ring.advance();
        }
    }
}

// An item's share of a panel, told once all stores of its warpgroup are complete.
struct Share {
    int* counters;
    int panel, tiles;

    __device__ __forceinline__ void tell() {
        if (tiles > 0) {
            __threadfence();
            asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counters + panel), "r"(tiles) : "memory");
            tiles = 0;
        }
    }
};

// What the warps that multiply do: `compute` is one item.
template <typename Compute>
__device__ __forceinline__ void compute_items(
    const Work& work, const Memory<Item>& memory, int* panel_counters, const Recorder& recorder, int warp, int lane,
    Compute compute) {
    Ring ring = memory.ring();
    Share share{panel_counters, 0, 0};
    int slot = 0;
    if (told_of(memory.draws, 0) >= work.num_items()) return;
    while (true) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const u64 begin = recorder.now();
        const Item& item = memory.items[slot];
        slot = (slot + 1) % ITEM_SLOTS;
        compute(ring, item, share);
        if (warp == 0 && lane == 0) {
            recorder.record(
                KIND_LAYER1_TILE, item.first_row / TILE_ROWS, item.col / BLOCK_COLS, item.panel, begin, begin);
        }
        if (item.is_last) break;
    }
    if (warp % 4 == 0 && lane == 0) share.tell();
}

// Pieces of rows before each expert's, and in all; the work of one warp.
__device__ __forceinline__ void list_pieces(int* first_piece, const int* counts, int experts, int lane) {
    int before = 0;
    for (int first = 0; first < experts; first += 32) {
        const int expert = first + lane;
        const int pieces = expert < experts ? pieces_of(__ldg(counts + expert)) : 0;
        int total;
        const int earlier = before_lane(pieces, lane, total);
        if (expert < experts) first_piece[expert] = before + earlier;
        before += total;
    }
    if (lane == 0) first_piece[experts] = before;
}
