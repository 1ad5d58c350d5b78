"""Compiles Triton's kernels for compute capability 9.0 where there is no GPU; prints one line each.

    TRITON_INTERPRET=0 python tests/compile_gpu_kernels.py [float32 bfloat16 ...]

A launch compiles, and runs nothing: results are not looked at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pyg_sar.kernels import on_gpu
from pyg_sar.kernels.scores import declared

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
}
SEEN: set[str] = set()


def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """Stands in for ``JITFunction.run``."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    types, constants = {}, {}
    for parameter in kernel.params:
        value = given[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            types[parameter.name] = "constexpr"
            constants[(parameter.num,)] = value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = "*" + TYPES[value.dtype]
        else:
            types[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
    key = f"{kernel.__name__} {types} {constants}"
    if key not in SEEN:
        SEEN.add(key)
        found = triton.compile(ASTSource(kernel, types, constants), target=TARGET)
        print(kernel.__name__, len(found.asm["cubin"]), "bytes of machine code", flush=True)


def main(names: list[str]) -> None:
    JITFunction.run = compiled
    operators, cpu = on_gpu._operators(), torch.device("cpu")
    for dtype in [getattr(torch, name) for name in names or ["float32"]]:
        small = on_gpu._Small(cpu, dtype, dtype)
        for name in ("gather_sum_", "edge_dot", *(["extremum_"] if dtype.itemsize > 2 else [])):
            on_gpu._sums_results(operators, small, name, 5, chunk=16)
        for kind, score in enumerate(declared()):
            if not score.softmax:
                continue
            features = None if score.term == "none" else 2
            shape = on_gpu.AttentionShape(
                kind=kind, heads=4, channels=8, features=features, own_key=True, own_query=True,
                drop=1 + kind % 2, p=0.4, slope=0.2, scale=0.3,
            )  # fmt: skip
            on_gpu._attention_results(operators, small, "", shape, chunk=16)


if __name__ == "__main__":
    main(sys.argv[1:])
