"""Kernels with pauses are the same kernels, and the assembler takes them."""

import subprocess
from pathlib import Path

from late_warps import with_pauses
from triton import knobs

PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry copies(.param .u64 from, .param .u64 to) {
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [from];
    ld.param.u64 %rd2, [to];
    setp.ne.u64 %p1, %rd1, 0;
    @%p1 ld.acquire.gpu.global.b32 %r1, [%rd1];
    @%p1 st.global.b32 [%rd2], %r1;
    ret;
}
"""


def test_some_accesses_to_global_memory_have_a_pause_before_them(tmp_path: Path) -> None:
    found = set()
    for seed in range(20):
        paused = with_pauses(PTX, seed, num_warps=4).splitlines()
        assert paused == with_pauses(PTX, seed, num_warps=4).splitlines()
        assert [line for line in paused if "nanosleep" not in line] == PTX.splitlines()
        before = [paused[place + 1].split()[1] for place, line in enumerate(paused) if "nanosleep" in line]
        found.add(tuple(before))
    assert found == {
        (),
        ("ld.acquire.gpu.global.b32",),
        ("st.global.b32",),
        ("ld.acquire.gpu.global.b32", "st.global.b32"),
    }
    file = tmp_path / "copies.ptx"
    file.write_text(with_pauses(PTX, 0, num_warps=4))
    subprocess.run([knobs.nvidia.ptxas.path, "-arch=sm_90a", str(file), "-o", str(tmp_path / "copies.o")], check=True)
