// Which item of a GEMM a block computes next, and which piece of rows and which columns that is.
//
// Items are drawn: a block that is ready takes the next one, so that neighbours in the order start together, and those
// of the same columns share their weights in L2. In turn, blocks drift apart, and weights come from memory several
// times, which costs time because the board's power is the limit (benchmarks/RESULTS.md, run 11).

constexpr int ITEM_TICKETS = 1; // among a launch's counters, behind the tickets of those that communicate
constexpr int PIECES_BESIDE = 8; // of an expert, whose items of the same columns are neighbours

// Of an expert's items, with `pieces` pieces of rows and `cols` blocks of columns, in the order of kernels/tiles.py.
struct Place {
    int piece, col;

    __device__ __forceinline__ Place(int index, int pieces, int cols) {
        const int first = index / (PIECES_BESIDE * cols) * PIECES_BESIDE, beside = min(PIECES_BESIDE, pieces - first);
        const int rest = index - first * cols;
        piece = first + rest % beside;
        col = rest / beside;
    }
};

// Draws of a thread that loads. One thread of a cluster leads: it draws, and tells all others through slots in the
// shared memory of their blocks. It cannot be as many items ahead of them as there are slots: an item has a stage or
// more, and stages are fewer.
struct Draws {
    int* tickets;
    u32 slots;
    bool leads;
    int turn = 0;
    int ticket = 0; // of the thread that leads, on its way

    __device__ __forceinline__ Draws(int* tickets, u32 slots, bool leads)
        : tickets(tickets), slots(slots), leads(leads) {
        if (leads) ticket = draw_ticket(tickets);
    }

    static __device__ __forceinline__ int clusters() { return gridDim.x / CLUSTER; }
    static __device__ __forceinline__ int first() { return blockIdx.x / CLUSTER; }

    // The item after this one, which must have been told of. A block's first two items are its own.
    __device__ __forceinline__ int next() {
        if (turn++ == 0) return first() + clusters();
        u64 told;
        do {
            asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(told) : "r"(told_at(turn)) : "memory");
        } while (int(told >> 32) != turn);
        return 2 * clusters() + int(told);
    }

    // Of the item after the next one. Its ticket was drawn an item ago, as one is here: that takes a microsecond.
    __device__ __forceinline__ void tell() {
        if (!leads) return;
        const u64 told = u64(turn + 1) << 32 | u32(ticket);
        const u32 own = told_at(turn + 1);
        if constexpr (CLUSTER == 1) {
            asm volatile("st.relaxed.cta.shared::cta.u64 [%0], %1;" ::"r"(own), "l"(told) : "memory");
        } else {
#pragma unroll
            for (int block = 0; block < CLUSTER; ++block) {
                u32 theirs;
                asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(block));
                asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(theirs), "l"(told) : "memory");
            }
        }
        ticket = draw_ticket(tickets);
    }

    // Of this item.
    __device__ __forceinline__ int slot() const { return slot_of(turn); }

    static __device__ __forceinline__ int slot_of(int turn) { return (turn - 1) % ITEM_SLOTS; }
    __device__ __forceinline__ u32 told_at(int turn) const { return slots + slot_of(turn) * DRAW_BYTES; }
};
