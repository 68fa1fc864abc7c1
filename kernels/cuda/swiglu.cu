// hidden = silu(gate) * up

// As the Triton twin computes it, bit for bit.
__device__ __forceinline__ float swiglu(float gate, float up) {
    float power, sigmoid;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, 1.4426950216293335f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(sigmoid) : "f"(1.0f), "f"(__fadd_rn(power, 1.0f)));
    return __fmul_rn(__fmul_rn(gate, sigmoid), up);
}
