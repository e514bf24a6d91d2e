"""What the trainer runs where: the table of docs/guides/training.md; ``python -m exatwin.report.runs_where``."""

from __future__ import annotations

import re
from pathlib import Path

from ..trainer.refusals import REFUSALS

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "training.md"
BLOCK = re.compile(r"(<!-- written from the trainer's rules -->\n).*?(<!-- end of the rules -->)", re.DOTALL)

RUNS = (
    ("tensor parallel, with sequence parallel", "our own collectives around local products; parameters know their cut"),
    ("pipeline: gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, a CSV table", "torch's pipelining plays our table"),
    (
        "data parallel, zero 0",
        "flat fp32 sum, one all-reduce; with overlap_grad_reduce torch's DistributedDataParallel",
    ),
    ("zero 1", "flat reduce-scatter, Adam on the shard, all-gather"),
    ("zero 2 and 3, hybrid shard", "torch's fully_shard over embedding, layers and head"),
    ("context parallel: ring, all_gather, all_to_all", "our own"),
    (
        "expert parallel, with a tensor degree of its own",
        "our own all-to-all; without a capacity no token is dropped",
    ),
    ("recompute none, selective, full, by stage and layer", "torch's checkpoint, whole passes"),
    ("fp32, bf16, fp16 with a loss scale; clipping", "fp32 master weights and moments"),
)


def table() -> str:
    """The table: what runs, and what is refused with the nearest that runs."""
    lines = [
        "| layout | CPU, gloo | CUDA with NCCL, ROCm with RCCL | how |",
        "|---|---|---|---|",
        *(f"| {what} | runs, tested | same code, not tried yet | {how} |" for what, how in RUNS),
        "",
        "| refused | why | what to set |",
        "|---|---|---|",
        *(f"| {rule.what} | {rule.reason} | `{', '.join(rule.nearest)}` |" for rule in REFUSALS),
        "",
    ]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its table replaced."""
    return BLOCK.sub(lambda found: f"{found[1]}{table()}{found[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
