#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""bench_table.py RESULTS.jsonl: the table of compare_fsdp2.sh and multi_gpu.sh.

A cell is the median over repetitions (of each run's median) ± half of the spread between the smallest and the largest, in
percent, and (how many repetitions).
"""
import json
import statistics
import sys
from collections import defaultdict

PEER_KEYS = {"stream_of_steps_ms": "stream_ms", "host_us_per_layer": "host_us"}


def read(path):
    lines = []
    for text in open(path, encoding="utf-8"):
        try:
            line = json.loads(text)
        except ValueError as error:  # a loss that is no number, say
            print(f"WARNING: left out, {error}: {text.strip()[:200]}")
            continue
        if line.get("peer") == "pytorch-fsdp2":  # another driver's names
            line.update({ours: line[theirs] for theirs, ours in PEER_KEYS.items() if theirs in line})
            line.update(way="fsdp2", comms=1, compute="plain", device_bytes=int(line.get("peak_MiB", 0) * 2**20))
        lines.append(line)
    return lines


def middle(values):
    return statistics.median(values) if values else None


def cell(values, digits=2):
    if not values:
        return "-"
    centre = statistics.median(values)
    text = f"{centre:.{digits}f}"
    if len(values) > 1 and centre:
        text += f" ±{50 * (max(values) - min(values)) / centre:.1f}% ({len(values)})"
    return text


def ratio(a, b):
    return f"{a / b:.3f}" if a and b else "-"


def table(head, rows):
    if not rows:
        return
    widths = [max(len(str(row[i])) for row in [head] + rows) for i in range(len(head))]
    for row in [head] + rows:
        print("  ".join(str(c).ljust(w) for c, w in zip(row, widths)).rstrip())
    print()


def variant(line):
    name = line["way"]
    for key, word in (("fused", ", fused"), ("keep", ", keep"), ("one_lane", ", one lane"), ("window", ", gather window"), ("window_grad", ", grad window"),
                      ("cta_zero", ", no CTAs"), ("clocked", ", clocked")):
        if line.get(key) or (key == "fused" and line.get("compute") == "fused"):
            name += word
    if line.get("ctas"):
        name += f", {line['ctas']} CTAs at most"
    if line.get("depth", 1) != 1:
        name += f", depth {line['depth']}"
    return name


def key_of(line):
    return line.get("mps", "off"), line["layers"], line["dim"], line["tokens"]


def print_main(lines, title):
    """Bare and library side by side, with one and with two communicators; FSDP2 beside them."""
    if lines:
        print(title)
    groups = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for figure in ("step_ms", "stream_ms", "comm_ms", "compute_ms", "comm_in_place_ms", "captured_ms"):
            if figure in line:
                groups[key_of(line) + (figure,)][variant(line), line.get("comms", 1)].append(line[figure])
    rows = []
    for key in groups:
        g = groups[key]
        fsdp2 = middle(g["fsdp2", 1])
        for comms in (1, 2):
            bare, library = g["bare", comms], g["library", comms]
            if not bare and not library and (comms == 2 or not fsdp2):
                continue
            rows.append((key[0], f"{key[1]} x {key[2]}", key[3], key[4][:-3], comms, cell(bare), cell(library),
                         ratio(middle(library), middle(bare)), cell(g["fsdp2", 1]) if comms == 1 else '"',
                         ratio(middle(bare), fsdp2), ratio(middle(library), fsdp2)))
    rows.sort(key=lambda r: (r[0] != "off", r[1], -r[2], r[4], ["step", "stream", "comm", "comm_in_place", "compute", "captured"].index(r[3])))
    table(("MPS", "shape", "tokens", "ms of", "comms", "bare", "library", "lib/bare", "FSDP2", "bare/FSDP2", "lib/FSDP2"), rows)


def print_variants(lines, title):
    rows = []
    for line in lines:
        rows.append((variant(line), line["world"], f"{line['layers']} x {line['dim']}", line["tokens"], line.get("comms", 1))
                    + tuple(f"{line[f]:.2f}" if f in line else "-" for f in
                            ("step_ms", "stream_ms", "comm_ms", "compute_ms", "captured_ms")) + (line.get("path", ""),))
    if rows:
        print(title)
    table(("way", "ranks", "shape", "tokens", "comms", "step", "stream", "comm", "compute", "captured", "path"), rows)


def print_host(lines):
    def both(line):
        return line["hooks_us"] + line["update_us"] if "hooks_us" in line else None

    rows = []
    bare = {}
    for line in lines:
        at = (line["world"], line["layers"], line.get("clocked", False))
        if line["way"] == "bare":
            bare[at] = line
        other = bare.get(at, {})
        rows.append((variant(line), line["world"], f"{line['layers']} x {line['dim']}")
                    + tuple(f"{line[f]:.2f}" if f in line else "-" for f in ("host_us", "hooks_us", "row_hooks_us", "update_us"))
                    + (ratio(line.get("hooks_us"), other.get("hooks_us")), ratio(both(line), both(other)))
                    + tuple(f"{line[f]:.2f}" if f in line else "-" for f in
                            ("hook_calls", "inside_us", "outside_us", "row_outside_us", "captured_host_us")))
    if rows:
        print("Host time, us a layer and step. The library gathers the next step's first layers in its update: `both` is hooks and update.\n"
              "in a row: in the third of three steps that the host enqueues without a wait. clocked: with a clock around each call of CUDA\n"
              "and NCCL; outside: hooks without them")
    table(("way", "ranks", "shape", "step", "hooks", "in a row", "update", "hooks/bare", "both/bare", "calls", "inside",
           "outside", "in a row", "captured"), rows)


def print_bytes(lines):
    seen, rows = set(), []
    for line in lines:
        if "device_bytes" not in line or line["way"] == "bare":
            continue
        key = (line["way"], line["world"], line["layers"], line["dim"], line["tokens"], variant(line))
        if key in seen:
            continue
        seen.add(key)
        library = line["way"] == "library"
        activations = line.get("activation_bytes", 0)
        rows.append((variant(line), line["world"], f"{line['layers']} x {line['dim']}", line["tokens"],
                     f"{line['device_bytes']:,}", f"{line['predicted_bytes']:,}" if library else "-",
                     "yes" if library and line["device_bytes"] == line["predicted_bytes"] else "NO" if library else "-",
                     f"{activations:,}" if library else "(within)"))
    if rows:
        print("Device bytes of a rank: the library's counters against its prediction; FSDP2's max_memory_allocated (activations of\n"
              "the library's bench are taken once, for its largest case)")
    table(("way", "ranks", "shape", "tokens", "bytes", "predicted", "equal", "activations"), rows)


def print_losses(lines):
    """All start from the same values and take the same steps: the losses of the first case must agree."""
    def case(line):
        return line["world"], line["layers"], line["dim"], bool(line.get("clip"))

    largest = defaultdict(int)
    for line in lines:
        largest[case(line)] = max(largest[case(line)], line["tokens"])
    losses = defaultdict(set)
    for line in lines:
        if line["tokens"] == largest[case(line)] and any(line.get("losses", [])):
            losses[case(line)].add((variant(line), tuple(line["losses"])))
    for (world, layers, dim, clip), values in sorted(losses.items()):
        print(f"Losses of the first steps, {world} ranks, {layers} x {dim}, {largest[world, layers, dim, clip]} tokens"
              + (", clipped" if clip else ""))
        width = max(len(way) for way, _ in values)
        for way, numbers in sorted(values):
            print(f"    {way:{width}}  " + " ".join(f"{x:.6f}" for x in numbers))
        for of_step in zip(*(numbers for _, numbers in values)):
            if max(of_step) - min(of_step) > 2e-3 * max(of_step):
                print("    WARNING: they differ by more than 0.2 %")
                break
        print()


def print_wire(lines):
    rows = [(line["wire"], line["world"], line["mib"], "yes" if line["window"] else "no", "yes" if line["cta_zero"] else "no",
             f"{line['nccl_GBps']:.1f}", f"{line['library_GBps']:.1f}", ratio(line["library_GBps"], line["nccl_GBps"]),
             f"{line['nccl_host_us']:.1f}", f"{line['library_host_us']:.1f}") for line in lines]
    if rows:
        print("Bus bandwidth, GB/s, and host us a call")
    table(("collective", "ranks", "MiB", "window", "no CTAs", "NCCL", "library", "ratio", "NCCL host", "library host"), rows)


def print_gpt(lines):
    for line in lines:
        words = ", ".join(f"{k} {v}" for k, v in line.items() if not isinstance(v, (list, dict)))
        print(f"gpt: {words}\n")


def print_nccl(lines):
    def plain(version):
        if isinstance(version, int):
            return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return str(version)

    versions = sorted({(line["way"], plain(line["nccl"])) for line in lines if "nccl" in line})
    print("NCCL that ran: " + ", ".join(f"{way} {version}" for way, version in versions))
    if len({version for _, version in versions}) > 1:
        print("WARNING: not one NCCL for all")
    print()


def main():
    lines = read(sys.argv[1])
    ways = [line for line in lines if "way" in line]
    if not lines:
        print("no results")
        return 1
    print_nccl(ways)
    print_main([line for line in ways if line.get("section") == "main"],
               "Steps; the library's norm and report sum over ranks before AdamW, the others sum nothing there")
    print_main([line for line in ways if line.get("section") == "clip"], "Steps whose gradient all three clip")
    print_variants([line for line in ways if line.get("section") == "fused"], "Variants, ms")
    print_host([line for line in ways if line.get("section") == "host"])
    print_bytes(ways)
    print_losses(ways)
    print_wire([line for line in lines if "wire" in line])
    print_gpt([line for line in lines if line.get("section") == "gpt"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
