// hidden = silu(gate) * up

// As the Triton twin computes it, bit for bit, in 9 instructions instead of 16: a power too small for a normal number
// vanishes in the sum, which is never below 1.
__device__ __forceinline__ float swiglu(float gate, float up) {
    float power, sigmoid;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, 1.4426950216293335f)));
    const float sum = __fadd_rn(power, 1.0f);
    const bool is_large = sum > 0x1p126f; // its inverse is no normal number
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(is_large ? __fmul_rn(sum, 0.25f) : sum));
    if (is_large) sigmoid = __fmul_rn(sigmoid, 0.25f);
    return __fmul_rn(__fmul_rn(gate, sigmoid), up);
}
