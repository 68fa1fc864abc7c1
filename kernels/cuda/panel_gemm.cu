// The GEMM of layer 1: y[q] = w[expert of q] @ a[q] for all routed rows, column panel by column panel.
//
// One warp loads. CLUSTER blocks have neighbouring columns of the same rows:
// each fetches its own weights and a part of the rows, which the copies hand to all of them.

constexpr int STAGING_BYTES = STAGED_ROWS * LINE; // of each warpgroup
static_assert(MOST_ROWS % STAGED_ROWS == 0 && MOST_ROWS % BOX_ROWS == 0);

// ---- work items

// See part_span, panel_of and panel_span of kernels/tiles.py.
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

struct Work {
    const int* counts;      // routed rows of each expert
    const int* starts;      // first routed row of each expert
    const int* first_piece; // in shared memory: pieces before each expert
    int experts, depth, cols, panels, rank;

    __device__ __forceinline__ int num_pieces() const { return first_piece[experts]; }
    __device__ __forceinline__ int num_cols() const { return ceil_div(cols, BLOCK_COLS); }
    __device__ __forceinline__ int num_items() const {
        return num_pieces() * num_cols() * (BLOCK_COLS / COLS / CLUSTER);
    }
    __device__ __forceinline__ int num_steps() const { return ceil_div(depth, DEPTH); }
};

// What the loading warp tells the warpgroups about an item, in shared memory.
struct alignas(16) Item {
    int first_row, rows, col, panel, tiles, expert;
};

static_assert(sizeof(Item) == 32 && ITEM_SLOTS > STAGES + 1);

// Panels from left to right, in each all pieces of rows, for each its columns. `rows` is a multiple of STEP; `tiles`
// says for how many of the plan's tiles the item counts.
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
    item.col = ((first * per_col + index % (width * per_col)) * CLUSTER + work.rank) * COLS;
    const int expert = item.expert = part_of(work.first_piece, work.experts, piece);
    const int place = piece - work.first_piece[expert], num = work.first_piece[expert + 1] - work.first_piece[expert];
    const int count = __ldg(work.counts + expert), tiles = ceil_div(count, TILE_ROWS), height = piece_height(count, num);
    item.first_row = __ldg(work.starts + expert) + place * height;
    // Heights are rounded up, so the last piece may be lower than the others; it has at least one step.
    item.rows = max(min(height, ceil_div(count - place * height, STEP) * STEP), STEP);
    item.tiles = (place + 1) * tiles / num - place * tiles / num;
    return item;
}

// ---- roles

__device__ __forceinline__ void load_items(
    const Work& work, const TensorMap& rows_map, const TensorMap& weights_map, const Memory<Item>& memory) {
    Ring ring = memory.ring();
    int slot = 0;
    const int num_items = work.num_items();
    for (int index = blockIdx.x / CLUSTER; index < num_items; index += gridDim.x / CLUSTER) {
        const Item item = item_at(work, index);
        memory.items[slot] = item; // seen by whoever has waited for the item's first stage
        slot = (slot + 1) % ITEM_SLOTS;
        const int boxes = ceil_div(item.rows, BOX_ROWS);
        for (int step = 0; step < work.num_steps(); ++step) {
            barrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            const u32 weights = ring.stages + ring.stage * STAGE_BYTES, rows = weights + WEIGHT_BYTES;
            const u32 ready = ring.full + 8 * ring.stage;
            barrier_expect(ready, WEIGHT_BYTES + boxes * BOX_ROWS * LINE);
            load_weights(weights, weights_map, ready, step * DEPTH, item.col, item.expert);
            for (int box = work.rank; box < boxes; box += CLUSTER) {
                load_rows(
                    rows + box * BOX_ROWS * LINE, rows_map, ready, step * DEPTH, item.first_row + box * BOX_ROWS);
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

// Through shared memory, which turns columns of y into rows of 64 columns, to 128 bytes of a row of y at a time.
__device__ __forceinline__ void store_item(
    const Sums& sums, const Item& item, u16* __restrict__ y, int cols, u32 staging, int group, int warp,
    int lane) {
    const int chunk = 2 * warp + ((lane >> 3) & 1);
    const int in_pair = ((lane >> 4) << 3) + (lane & 7);
    const int col = item.col + group * (COLS / 2) + (lane % 8) * 8;
    u16* const target = y + u64(item.first_row) * cols + col;
#pragma unroll
    for (int begin = 0; begin < MOST_ROWS; begin += STAGED_ROWS) {
        if (begin >= item.rows) break;
        group_sync(group);
#pragma unroll
        for (int row = begin; row < begin + STAGED_ROWS; row += STEP) {
            const int place = row / 2;
            const u32 address = staging + (row - begin + in_pair) * LINE + ((chunk ^ (lane & 7)) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(address), "r"(pack(sums[place], sums[place + 1])),
                         "r"(pack(sums[place + 2], sums[place + 3])), "r"(pack(sums[place + 4], sums[place + 5])),
                         "r"(pack(sums[place + 6], sums[place + 7])) : "memory");
        }
        group_sync(group);
        if (col < cols) {
#pragma unroll
            for (int row = begin; row < begin + STAGED_ROWS; row += STEP) {
                if (row >= item.rows) break;
                const int in_stage = row - begin + 4 * warp + lane / 8;
                u32 x, y, z, w;
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                             : "r"(staging + in_stage * LINE + ((lane % 8 ^ (in_stage & 7)) << 4)));
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                             ::"l"(target + u64(begin + in_stage) * cols), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
            }
        }
    }
    group_sync(group);
}

__device__ __forceinline__ void compute_item(
    Ring& ring, const Item& item, Share& share, u16* y, int cols, u32 staging, int group, int warp, int lane,
    int num_steps) {
    Sums sums;
    const bool leads = warp == 0 && lane == 0;
    // Of the item before, whose stores have had time to complete.
    multiply_item(ring, sums, item.rows, group, lane, num_steps, [&] { if (leads) share.tell(); });
    store_item(sums, item, y, cols, staging, group, warp, lane);
    share.panel = item.panel;
    share.tiles = item.tiles;
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

__device__ __forceinline__ void multiply_items(
    const Work& work, const Memory<Item>& memory, u16* y, int* panel_counters, const Recorder& recorder, int warp,
    int lane) {
    const int group = warp / 4, num_items = work.num_items(), num_steps = work.num_steps();
    Ring ring = memory.ring();
    Share share{panel_counters, 0, 0};
    int slot = 0;
    for (int index = blockIdx.x / CLUSTER; index < num_items; index += gridDim.x / CLUSTER) {
        barrier_wait(ring.full + 8 * ring.stage, ring.parity);
        const u64 begin = recorder.now();
        const Item& item = memory.items[slot];
        slot = (slot + 1) % ITEM_SLOTS;
        compute_item(
            ring, item, share, y, work.cols, memory.staging + group * STAGING_BYTES, group, warp % 4, lane, num_steps);
        if (warp == 0 && lane == 0) {
            recorder.record(
                KIND_LAYER1_TILE, item.first_row / TILE_ROWS, item.col / BLOCK_COLS, item.panel, begin, begin);
        }
    }
    if (warp % 4 == 0 && lane == 0) share.tell();
}
