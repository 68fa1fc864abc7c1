// How what a block has written reaches a rail peer: peers whose memory is mapped, or NVSHMEM.

#ifndef COMET_TRANSPORT_CUH
#define COMET_TRANSPORT_CUH

#include "symm.cuh"

// A block hands this over after all of its threads have written and met.
struct Delivery {
    char* written;       // the block wrote there: at the peer, or in staging memory
    char* arrives;       // this rank's address of the memory in which it arrives at the peer
    u64 bytes;
    int* flag_at_peer;   // if that is mapped
    u64* flag;           // this rank's address of the flag
    int value, rank;     // of the flag, which grows; the peer's number
    bool is_nbi;         // whether the block may go on before NVSHMEM has read what it wrote
};

// The peer's memory is mapped: the block has written there.
struct Mapped {
    static __device__ __forceinline__ void deliver(const Delivery& delivery) {
        if (threadIdx.x == 0) store_release(delivery.flag_at_peer, delivery.value);
    }
};

#ifdef COMET_NVSHMEM
// Declarations of NVSHMEM's device library, versions 3.4 and later.
enum threadgroup_t { nvshmemi_threadgroup_thread = 0, nvshmemi_threadgroup_warp = 1, nvshmemi_threadgroup_block = 3 };
enum nvshmemi_amo_t { NVSHMEMI_AMO_SIGNAL_SET = 9, NVSHMEMI_AMO_SIGNAL_ADD = 10 };
template <threadgroup_t SCOPE>
__device__ void nvshmemi_transfer_put_signal(void* target, void* source, unsigned long bytes, void* signal,
                                             unsigned long value, nvshmemi_amo_t operation, int pe, bool nbi);

// The network takes it from staging memory, and raises the flag behind it.
struct Nvshmem {
    static __device__ __forceinline__ void deliver(const Delivery& delivery) {
        nvshmemi_transfer_put_signal<nvshmemi_threadgroup_block>(
            delivery.arrives, delivery.written, delivery.bytes, delivery.flag, u64(delivery.value),
            NVSHMEMI_AMO_SIGNAL_SET, delivery.rank, delivery.is_nbi);
    }
};
#endif

#endif
