// Puts words and rows of tokens into the memory of rail peers; slots, words and flags: kernels/network/legs.py.
//
// A block takes every n-th item: the words of a slot, then its chunks of rows, slot by slot. No block waits, so it
// ends. A rank that has failed, in its group or inside its node, sends nothing.

#include "include/config.cuh"
#include "include/transport.cuh"

struct PutArgs {
    const char* x;           // (T, row_bytes)
    const int* tokens;       // (S, M) rows to send through each slot, or (M,) through all
    const int* words;        // (S, M, per_token), or (M, per_token)
    const int* counts;       // (S,)
    const int* number;       // (1,)
    char *own_words, *own_rows, *own_flags;                       // what arrives here
    const u64 *word_targets, *row_targets, *flag_targets;         // (N,) where blocks write, of each node
    const int* ranks;        // (N,) numbers of the rail peers, or null
    const int* epoch;        // (1,)
    s64 *fault, *inner_fault;
    int call, node, num_nodes, ring, num_chunks, slot_words, is_home, is_nbi, first_slot, num_slots, per_token;
    int row_bytes, by_slot, first_chunk, sent_chunks, has_words;
};

// Some bytes, a multiple of 16, of a row each, by all threads of the block.
template <class Config>
__device__ __forceinline__ void copy_rows(char* target, const char* x, const int* tokens, int rows, int row_bytes) {
    const int per_row = row_bytes / 16, total = rows * per_row;
#pragma unroll 4
    for (int index = threadIdx.x; index < total; index += Config::THREADS) {
        const int row = index / per_row;
        const u64 source = u64(__ldg(tokens + row)) * row_bytes + (index - row * per_row) * 16;
        __stcg(reinterpret_cast<uint4*>(target) + index, *reinterpret_cast<const uint4*>(x + source));
    }
}

template <class Config>
__device__ __forceinline__ void copy_words(int* target, const PutArgs& args, const int* words, int count) {
    const int total = count * args.per_token;
    int* const behind = target + Config::HEADER;
    for (int index = threadIdx.x; index < total; index += Config::THREADS) behind[index] = words[index];
    if (threadIdx.x == 0) {
        target[0] = count;
        target[1] = args.call;
        target[2] = *args.number;
    }
}

template <class Config>
__device__ __forceinline__ void put_rows(const PutArgs& args) {
    const int max_tokens = args.num_chunks * Config::CHUNK, epoch = *args.epoch + 1, flags = 1 + args.num_chunks;
    const int num_words = args.has_words ? args.num_slots : 0, end = num_words + args.num_slots * args.sent_chunks;
    const bool failed = has_failed({args.fault, 0}) || has_failed({args.inner_fault, 0});
    if (__syncthreads_or(failed)) return;
    for (int item = blockIdx.x; item < end; item += gridDim.x) {
        const bool is_words = item < num_words;
        const int place = item - num_words, chunk = is_words ? 0 : args.first_chunk + place % args.sent_chunks;
        const int slot = args.first_slot + (is_words ? item : place / args.sent_chunks);
        const int peer = (args.node + (args.is_home ? args.num_nodes - 1 - slot : 1 + slot)) % args.num_nodes;
        const int count = args.counts[slot], first = chunk * Config::CHUNK, part = args.by_slot ? slot : 0;
        if (!is_words && first >= count) continue;
        const u64 flag = u64(slot) * flags + (is_words ? 0 : 1 + chunk);
        Delivery delivery;
        if (is_words) {
            const u64 offset = u64(slot % args.ring) * args.slot_words * 4;
            delivery.written = reinterpret_cast<char*>(args.word_targets[peer]) + offset;
            delivery.arrives = args.own_words + offset;
            delivery.bytes = 4ull * (Config::HEADER + u64(count) * args.per_token);
            copy_words<Config>(reinterpret_cast<int*>(delivery.written), args,
                               args.words + u64(part) * max_tokens * args.per_token, count);
        } else {
            const u64 offset = (u64(slot % args.ring) * max_tokens + first) * args.row_bytes;
            const int rows = min(Config::CHUNK, count - first);
            delivery.written = reinterpret_cast<char*>(args.row_targets[peer]) + offset;
            delivery.arrives = args.own_rows + offset;
            delivery.bytes = u64(rows) * args.row_bytes;
            copy_rows<Config>(delivery.written, args.x, args.tokens + u64(part) * max_tokens + first, rows,
                              args.row_bytes);
        }
        delivery.flag_at_peer = reinterpret_cast<int*>(args.flag_targets[peer]) + 2 * flag;
        delivery.flag = reinterpret_cast<u64*>(args.own_flags) + flag;
        delivery.value = epoch;
        delivery.is_nbi = args.is_nbi;
        delivery.rank = args.ranks == nullptr ? 0 : args.ranks[peer];
        __threadfence_system();
        __syncthreads();
        Config::Transport::deliver(delivery);
    }
}
