"""Compiles every Triton kernel of ours for one GPU architecture: `python -m tests.cuda_build.compiled_kernels 90`.

Triton and ptxas are those that torch pins; the driver is a stub. Prints one line a variant: registers, spilled bytes,
shared memory. Exits with 1 if one does not compile.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from tests.cuda_build.triton_driver import TritonDriver

driver.set_active(TritonDriver(int(sys.argv[1])))

from outrider.actors.verification import triton_draws, triton_kernel, triton_top_p
from outrider.actors.verification.search import TILE

VOCABULARIES = {"Llama 3": 128256, "Qwen 2.5": 151936, "GPT-2": 50257}


def tensors(*dtypes: Any) -> list[Any]:
    return [None if dtype is None else MockTensor(dtype) for dtype in dtypes]


def variants() -> Iterator[tuple[str, Any, list[Any], dict[str, Any]]]:
    """A name, a kernel, and the arguments of a launch."""
    f32, f64, i32, i64, u8 = torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8
    for (model, size), threshold, coupled in itertools.product(VOCABULARIES.items(), (False, True), (False, True)):
        (logits, *rest) = tensors(f32, f32, f32 if threshold else None, i64, i64, i64, i64, i64, f32, f32, i32)
        yield (
            f"scan {model}{' threshold' * threshold}{' coupled' * coupled}", triton_kernel.scan,
            [logits, size, *rest, triton.cdiv(size, TILE)],
            {"HAS_THRESHOLD": threshold, "HAS_COUPLED": coupled, "TILE": TILE},
        )  # fmt: skip
    (logits, *rest, ids) = tensors(f32, f32, None, i64, i64, i64, i64, i64, f32, f32, i32, i64)
    yield (
        "scan cut head", triton_kernel.scan, [logits, 32768, *rest, 32, ids],
        {"HAS_THRESHOLD": False, "HAS_COUPLED": True, "TILE": TILE, "HAS_TOKEN_IDS": True},
    )  # fmt: skip
    sizes = ((128256, 64), (50257, 1), (262144, 256))
    for (size, n), threshold, has_q in itertools.product(sizes, (False, True), (False, True)):
        tiles, count = triton.cdiv(size, TILE), n if has_q else 1
        (logits, *first) = tensors(f32, f32, f32 if threshold else None, *[i64] * 7)
        q_ids, q_probs = tensors(*((i64, f32) if has_q else (None, None)))
        *scanned, committed, status = tensors(f32, f32, i32, i32, i64)
        yield (
            f"decide {size} tokens, n {count}{' threshold' * threshold}{' q' * has_q}", triton_kernel.decide,
            [logits, size, *first, q_ids, q_probs, count, *scanned, tiles, committed, status, 4],
            {
                "HAS_THRESHOLD": threshold, "HAS_Q": has_q, "TILE": TILE, "TILES": triton.next_power_of_2(tiles),
                "N": triton.next_power_of_2(count),
            },
        )  # fmt: skip
    yield (
        "find_nucleus", triton_top_p.find_nucleus, [*tensors(f32, f32), 5, 128256, *tensors(f64, f32)],
        {"ROWS": 1, "TILE": TILE},
    )  # fmt: skip
    for threshold, others in itertools.product((False, True), repeat=2):
        values, q_ids = tensors(f32, i64)
        rest = tensors(
            f32, f32 if threshold else None, i64, i64, i64, i64, f32, u8, *([i64, f32] if others else [None, None])
        )
        yield (
            f"draw_from_q{' threshold' * threshold}{' alternatives' * others}", triton_draws.draw_from_q,
            [values, q_ids, 64, *rest, 2 * others], {"HAS_THRESHOLD": threshold, "HAS_OTHERS": others, "N": 64},
        )  # fmt: skip


def used(ptx: str) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, as ptxas says."""
    (architecture,) = re.findall(r"\.target\s+(sm_\w+)", ptx)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(int(sys.argv[1])).path, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def main() -> int:
    failures = 0
    for name, kernel, arguments, constants in variants():
        try:
            compiled = kernel.warmup(*arguments, grid=(1,), **constants)
            registers, spilled = used(compiled.asm["ptx"])
        except Exception as error:  # noqa: BLE001 - every kernel is tried
            failures += 1
            print(f"sm_{sys.argv[1]} {name}: FAILED: {type(error).__name__}: {str(error).strip()[-600:]}", flush=True)
            continue
        shared = compiled.metadata.shared
        print(f"sm_{sys.argv[1]} {name}: {registers} registers, {spilled} spilled, {shared} B shared", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
