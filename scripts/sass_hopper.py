"""What ptxas makes of the Hopper kernel's inner loop, for the product and for the variants of tune_hopper.py.

One row a variant: registers and spills, the instructions a warp executes in one step (64 query rows, one
key tile) by the pipe they need, and the clocks an SM sub-partition spends on each pipe for 128 x 128 scores
if nothing ever waits: 64 x N x 16 multiply-adds N / 2, MUFU 8 an instruction, ALU 2, issue 1. No GPU; needs
nvcc and nvdisasm (`pip install nvidia-cuda-nvdisasm`).

    python scripts/sass_hopper.py --variants d128_base d128_no_turns
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tune_hopper

from videoattn.kernels import library

RARE = 40  # a stretch at least this long that a branch can skip is not part of the ordinary step
FLOAT = {"FFMA", "FADD", "FMUL"}
ALU = {
    "FMNMX",
    "VIMNMX",
    "VIMNMX3",
    "F2FP",
    "LOP3",
    "SHF",
    "ISETP",
    "FSETP",
    "SEL",
    "FSEL",
    "PLOP3",
    "LEA",
    "IADD3",
}
MOVES = {"MOV", "R2UR", "IMAD"}

Line = tuple[str, str]  # ("label", name) or ("code", text)


def disassemble(nvdisasm: str, cubin: Path, kernel: str) -> list[Line]:
    """Labels and instructions of one kernel."""
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    lines: list[Line] = []
    inside = False
    for text in done.stdout.splitlines():
        if text.startswith(".text."):
            inside = text.startswith(f".text.{kernel}:")
        elif inside and (found := re.match(r"(\.L_x_\d+):", text)):
            lines.append(("label", found[1]))
        elif inside and (found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", text)):
            lines.append(("code", found[1]))
    return lines


def opcode(text: str) -> str:
    """FFMA of `@!P0 FFMA.FTZ R1, …`."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].partition(".")[0]


def branches(lines: list[Line]) -> list[tuple[int, int]]:
    """(from, to) of every branch to a label of the same list."""
    places = {name: i for i, (kind, name) in enumerate(lines) if kind == "label"}
    found = []
    for i, (kind, text) in enumerate(lines):
        label = re.search(r"\.L_x_\d+", text) if kind == "code" and opcode(text) == "BRA" else None
        if label is not None and label[0] in places:
            found.append((i, places[label[0]]))
    return found


def inner_loop(lines: list[Line]) -> list[Line]:
    """The shortest loop that holds wgmma, without what it seldom executes.  Raises ValueError."""
    loops = [
        (source - target, target, source)
        for source, target in branches(lines)
        if target < source and any(kind == "code" and "HGMMA" in text for kind, text in lines[target:source])
    ]
    if not loops:
        raise ValueError("no loop with wgmma in it")
    _, start, end = min(loops)
    body = lines[start : end + 1]
    skipped: set[int] = set()
    for source, target in branches(body):
        if target - source > RARE:
            skipped |= set(range(source + 1, target))
    return [line for i, line in enumerate(body) if i not in skipped]


def count(loop: list[Line]) -> Counter[str]:
    return Counter(opcode(text) for kind, text in loop if kind == "code")


def only(kernel: str, source: Path) -> None:
    """Leave this kernel alone in attention.cu: the others would only cost time."""
    kept = []
    for line in source.read_text().splitlines():
        if line.startswith("VIDEOATTN_HOPPER_KERNEL(") and f"({kernel}," not in line:
            continue
        kept.append(re.sub(r"VIDEOATTN_ENTRY\((\w+)\),?", lambda m: m[0] if m[1] == kernel else "", line))
    source.write_text("\n".join(kept) + "\n")


def report(variant: tune_hopper.Variant, nvdisasm: str) -> str:
    """The variant's row."""
    compiler = library.find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        root = variant.write(Path(folder))
        kernel = f"{variant.kernel}_bf16"
        only(kernel, root / "hopper" / "attention.cu")
        cubin = Path(folder) / "kernel.cubin"
        command = [compiler.path, *compiler.flags, *library.FLAGS, "-Xptxas=-v", "-cubin", "-o", cubin]
        command += ["-gencode=arch=compute_90a,code=sm_90a", root / "hopper" / "attention.cu"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise library.BuildError(next(line for line in done.stderr.splitlines() if "error" in line))
        loop = inner_loop(disassemble(nvdisasm, cubin, kernel))
    found = re.search(
        rf"entry function '{kernel}'[\s\S]*?(\d+) bytes spill stores[\s\S]*?Used (\d+) registers", done.stderr
    )
    assert found is not None
    ops = count(loop)
    head_dim = variant.head_dim
    tile = variant.tile
    warps = 128 / tile * 2  # steps of a warp that 128 x 128 scores take each sub-partition
    clocks = {
        "tensor": (head_dim / 16 * tile / 2 + tile / 16 * head_dim / 2) * warps,
        "MUFU": 8 * ops["MUFU"] * warps,
        "ALU": 2 * sum(ops[name] for name in ALU) * warps,
        "issue": ops.total() * warps,
    }
    groups = {
        "HGMMA": ops["HGMMA"],
        "MUFU": ops["MUFU"],
        "float": sum(ops[name] for name in FLOAT),
        "max": ops["FMNMX"] + ops["VIMNMX"] + ops["VIMNMX3"],
        "pack": ops["F2FP"],
        "move": sum(ops[name] for name in MOVES),
    }
    groups["rest"] = ops.total() - sum(groups.values())
    cells = [f"{found[2]:>4} {found[1]:>6} {ops.total():>6}"]
    cells += [f"{value:5}" for value in groups.values()]
    cells += [f"{value:7.0f}" for value in clocks.values()]
    return " ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(tune_hopper.VARIANTS)
    parser.add_argument("--variants", nargs="+", default=names, choices=names)
    parser.add_argument("--nvdisasm", default=None, metavar="FILE")
    options = parser.parse_args()
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvdisasm"))
    nvdisasm = options.nvdisasm or shutil.which("nvdisasm") or (str(packaged[-1]) if packaged else None)
    if nvdisasm is None:
        print("there is no nvdisasm: pip install nvidia-cuda-nvdisasm, or name one", file=sys.stderr)
        return 1
    groups = "HGMMA  MUFU float   max  pack  move  rest"
    print(f"{'variant':<28} regs spills a step {groups}  tensor    MUFU     ALU   issue")
    for name in options.variants:
        print(f"{name:<28} {report(tune_hopper.VARIANTS[name], nvdisasm)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
