// Which item of a GEMM a block computes next, and which piece of rows and which columns that is.
//
// Items are drawn: a block that is ready takes the next one, so that neighbours in the order start together, and those
// of the same columns share their weights in L2. In turn, blocks drift apart, and weights come from memory several
// times, which costs time because the board's power is the limit (benchmarks/results/forward_kernels.md).

constexpr int ITEM_TICKETS = 1; // among a launch's counters, behind the tickets of those that communicate
constexpr int PIECES_BESIDE = 8; // of an expert, whose items of the same columns are neighbours

// Of an expert's items, with `pieces` pieces of rows and `cols` blocks of columns, in the order of
// kernels/gemm/tiles.py.
struct Place {
    int piece, col;

    __device__ __forceinline__ Place(int index, int pieces, int cols) {
        const int first = index / (PIECES_BESIDE * cols) * PIECES_BESIDE, beside = min(PIECES_BESIDE, pieces - first);
        const int rest = index - first * cols;
        piece = first + rest % beside;
        col = rest / beside;
    }
};

// The next number of a counter. Whoever draws it ahead of its use does not wait for it: an atomicAdd would, for the
// assembler makes one of it for the whole warp, and hands out its result at once.
__device__ __forceinline__ int draw_ticket(int* counter) {
    int ticket;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(ticket) : "l"(counter) : "memory");
    return ticket;
}

// What a block reads in a slot once it has been told of its item of this number. A slot is a barrier and a ticket.
__device__ __forceinline__ int told_of(u32 slots, u32 number) {
    const u32 slot = slots + number % ITEM_SLOTS * DRAW_BYTES;
    barrier_wait(slot, number / ITEM_SLOTS & 1);
    int ticket;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(ticket) : "r"(slot + 8) : "memory");
    return ticket;
}

// Draws of a thread that loads. One thread of a cluster leads: it draws, and tells all others through slots in the
// shared memory of their blocks. It tells of the item after the next one, in a slot that all have read: an item has a
// stage or more, and slots are at least three more than stages. All items are drawn, so whatever blocks of a launch
// are on the GPU finish it.
struct Draws {
    int* tickets;
    u32 slots;
    bool leads;
    u32 number = 0; // of the block's item
    int drawn[2];   // of the thread that leads: what it tells next

    // Where a block begins: tickets are on their way while it finds its bearings.
    __device__ __forceinline__ Draws(int* tickets, u32 slots, bool leads)
        : tickets(tickets), slots(slots), leads(leads) {
        if (leads) {
            drawn[0] = draw_ticket(tickets);
            drawn[1] = draw_ticket(tickets);
        }
    }

    // The block's first item, once all blocks of the cluster have their slots.
    __device__ __forceinline__ int first() {
        if (leads) {
            tell_of(0, drawn[0]);
            tell_of(1, drawn[1]);
            drawn[0] = draw_ticket(tickets);
        }
        told_of(slots, 1); // a block that ends at once has no more stores on their way to it
        return told_of(slots, 0);
    }

    // The item after this one.
    __device__ __forceinline__ int next() { return told_of(slots, ++number); }

    // Of the item after the next one. Its ticket was drawn an item ago, as one is here: that takes a microsecond. Who
    // has no next item waits for nothing more, so nothing is told.
    __device__ __forceinline__ void tell(bool is_last) {
        if (!leads || is_last) return;
        tell_of(number + 1, drawn[0]);
        drawn[0] = draw_ticket(tickets);
    }

    // Where it lies for those that multiply.
    __device__ __forceinline__ int slot() const { return (number - 1) % ITEM_SLOTS; }

private:
    __device__ __forceinline__ void tell_of(u32 number, int ticket) const {
        const u32 slot = slots + number % ITEM_SLOTS * DRAW_BYTES;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) {
            store_and_arrive(slot + 8, ticket, slot, block);
        }
    }
};
