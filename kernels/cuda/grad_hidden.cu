// What becomes of the products of hidden's gradient: rows of it, rounded.

struct Results {
    u16* grad_hidden;
};

__device__ __forceinline__ void compute_item(
    Ring& ring, const Item& item, const Results& results, int ffn, u32 staging, int group, int warp, int lane,
    int num_steps) {
    Sums sums;
    multiply_item(ring, sums, item.rows, group, lane, num_steps, [] {});
    store_item(sums, item, results.grad_hidden, ffn, staging, group, warp, lane);
}
