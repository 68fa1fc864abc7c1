// Weight gradients: out[expert] = sum over the expert's routed rows q of a[q]^T b[q].
//
// A tile is 128 columns of a times 256 columns of b, of all rows of one expert. Rows are few, often only a thousand, so
// what counts is that a tile's end costs nothing: one warp loads, and is ahead in the next tiles; of the two
// warpgroups, which have 64 columns of a each, the first is LEAD steps ahead of the second, so that one stores while
// the other multiplies. One alone keeps the tensor cores busy.

#include "include/gemm/wgrad.cuh"

template <class Config>
__device__ __forceinline__ void wgrad(const WgradArgs& args) {
    static_assert(WgradStorage<Config>::BYTES + WgradShape<Config>::LEAD_BYTES == Config::SHARED_BYTES);
    extern __shared__ char dynamic[];
    const WgradStorage<Config> storage(dynamic);
    const u32 leads = shared_address(storage.behind());

    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool loads = warp == Config::MATH_WARPS && lane == 0;
    TileScheduler<Config> scheduler(args.counter, storage.slots, loads);
    if (loads) {
        for (int stage = 0; stage < Config::NUM_STAGES; ++stage) {
            mbarrier_init(leads + 8 * stage, Config::MATH_WARPS / WgradShape<Config>::GROUPS);
        }
        storage.init(1, Config::MATH_WARPS);
    }
    __syncthreads();

    const WgradProblem problem = args.problem;
    if (warp < Config::MATH_WARPS) {
        take_math_registers<Config>();
        multiply_tiles<Config>(problem, args.out_map, storage, leads, warp, lane);
    } else {
        give_math_registers<Config>();
        if (loads) load_tiles<Config>(args, problem, storage, scheduler);
    }
}
