"""What the full-vocabulary comparison costs, beside plain torch and the machine's memory.

    python benchmarks/compare.py [--vocab 49152 151936] [--rows 64] [--threads 2] [--repeat 5]

Prints, measured in one run, the best of ``--repeat`` interleaved rounds (other work on the machine
only ever adds time): milliseconds a token of plain torch on whole [T, V] tensors and of ours, the
ratio, the share of the measured memory bandwidth, and the peak extra memory of each. Then what
heads cost, by rows of a chunk. Exit 1 if the ratio at V = 49,152 is under 3.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable

import torch

from mismatch_audit.compare import Head, compare_hidden, compare_logits

ETA = 1e-6
MIB = 1 << 20
WANTED = 3.0


def plain(z_p: torch.Tensor, z_q: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same columns as one writes them down: every intermediate a whole [T, V] tensor."""
    logp, logq = torch.log_softmax(z_p.float(), -1), torch.log_softmax(z_q.float(), -1)
    p, q, x = logp.exp(), logq.exp(), logp - logq
    nucleus = (p >= ETA) | (q >= ETA)
    top_p, top_q = logp.topk(2), logq.topk(2)
    mean = (q * x).sum(-1)
    inf = torch.tensor(torch.inf)
    return {
        "kl_engine_reference": -mean,
        "kl_reference_engine": (p * x).sum(-1),
        "tv": (p - q).abs().sum(-1) / 2,
        "chi2": (q * (x.exp() - 1) ** 2).sum(-1),
        "drift": torch.where(nucleus, x, -inf).amax(-1) - torch.where(nucleus, x, inf).amin(-1),
        "tail_mass": torch.maximum((p * ~nucleus).sum(-1), (q * ~nucleus).sum(-1)),
        "logit_var": (q * x * x).sum(-1) - mean**2,
        "entropy": -(p * logp).sum(-1),
        "reference_margin": top_p.values[:, 0] - top_p.values[:, 1],
        "engine_margin": top_q.values[:, 0] - top_q.values[:, 1],
        "flip": top_p.indices[:, 0] != top_q.indices[:, 0],
        "reference_logprob": logp.gather(1, ids[:, None])[:, 0],
        "engine_logprob": logq.gather(1, ids[:, None])[:, 0],
        "nonfinite": (~z_p.isfinite()).sum(-1) + (~z_q.isfinite()).sum(-1),
    }


def best(repeat: int, *functions: Callable[[], object]) -> list[float]:
    """Seconds of each, the least of ``repeat`` rounds that run them in turn; one round to warm."""
    times = [float("inf")] * len(functions)
    for round_ in range(repeat + 1):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            if round_:
                times[i] = min(times[i], time.perf_counter() - start)
    return times


def peak_bytes(function: Callable[[], object]) -> int:
    """Peak of the resident memory above its level before the call (Linux)."""

    def resident(key: str) -> int:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(key)) * 1024

    ctypes.CDLL(None).malloc_trim(0)  # hand back what earlier calls freed, or it hides the growth
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # forget the peak so far
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def logits_table(vocab: int, rows: int, repeat: int) -> float:
    """One vocabulary: our core against plain torch. Returns the ratio for bf16 against fp32."""
    g = torch.Generator().manual_seed(0)
    z_p = torch.randn(rows, vocab, generator=g) * 3
    drifted = z_p + 0.05 * torch.randn(rows, vocab, generator=g)
    ids = torch.randint(0, vocab, (rows,), generator=g)
    memory = torch.ones(64 * MIB)  # 256 MiB: eight times the last cache
    ratios = []
    for name, z_q in (("bf16", drifted.bfloat16()), ("fp32", drifted)):
        torch_s, our_s, read_s = best(
            repeat,
            lambda z_q=z_q: plain(z_p, z_q, ids),
            lambda z_q=z_q: compare_logits(z_p, z_q, ids),
            memory.sum,
        )
        bandwidth = memory.nbytes / read_s
        share = (z_p.nbytes + z_q.nbytes) / our_s / bandwidth
        torch_peak = peak_bytes(lambda z_q=z_q: plain(z_p, z_q, ids))
        our_peak = peak_bytes(lambda z_q=z_q: compare_logits(z_p, z_q, ids))
        ratios.append(torch_s / our_s)
        print(
            f"V = {vocab:7,d}  engine {name}  plain torch {torch_s / rows * 1e3:6.3f} ms/token  "
            f"ours {our_s / rows * 1e3:6.3f} ms/token  ratio {torch_s / our_s:5.1f}  "
            f"memory {share:4.0%} of {bandwidth / 1e9:.1f} GB/s  "
            f"peak {torch_peak / MIB:.0f} / {our_peak / MIB:.0f} MiB"
        )
    return ratios[0]


def heads_table(vocab: int, width: int, rows: int, repeat: int) -> None:
    """What a row costs from hidden states on, and how much of it is the two heads."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, width, generator=g) / 10
    hidden = torch.randn(rows, width, generator=g) * 2
    half = hidden.bfloat16()
    reference, engine = Head(weight), Head(weight.bfloat16())
    ids = torch.randint(0, vocab, (rows,), generator=g)
    print(f"\nheads, V = {vocab:,d}, H = {width}, ms/token")
    for chunk in sorted({16, 32, 64, 128, rows}):
        out = torch.empty(chunk, vocab)
        out16 = torch.empty(chunk, vocab, dtype=torch.bfloat16)
        fp32, bf16, linear = best(
            max(2, repeat // 2),
            lambda out=out: reference.logits(hidden[: len(out)], out=out),
            lambda out16=out16: engine.logits(half[: len(out16)], out=out16),
            lambda chunk=chunk: torch.nn.functional.linear(half[:chunk], engine.weight),
        )
        print(
            f"  {chunk:4d} rows  fp32 {fp32 / chunk * 1e3:6.3f}  bf16 {bf16 / chunk * 1e3:6.3f}  "
            f"(torch's bf16 linear, the same bits: {linear / chunk * 1e3:6.3f})"
        )
    (whole,) = best(
        max(2, repeat // 2), lambda: compare_hidden(hidden, reference, half, engine, ids)
    )
    peak = peak_bytes(lambda: compare_hidden(hidden, reference, half, engine, ids))
    print(
        f"  compare_hidden, both heads and the comparison: {whole / rows * 1e3:.3f} ms/token, "
        f"peak extra memory {peak / MIB:.0f} MiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    few = torch.zeros(2, 64)
    compare_logits(few, few.bfloat16(), torch.zeros(2, dtype=torch.int64))
    print(f"first call (loading or compiling the kernel): {time.perf_counter() - start:.1f} s")
    ratios = {v: logits_table(v, options.rows, options.repeat) for v in options.vocab}
    heads_table(options.vocab[0], options.width, 4 * options.rows, options.repeat)
    slow = [v for v, ratio in ratios.items() if v == 49152 and ratio < WANTED]
    print(f"\nat least {WANTED:.0f}x at V = 49,152: {'no' if slow else 'yes'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
