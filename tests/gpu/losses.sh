#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# losses.sh: sourced by the scripts that train on a GPU: how far the losses of two runs (gpt --losses) are apart, step by step.

compare() { # compare NAME FILE FILE MOST: prints the worst; false if it is MOST percent or more, or a loss is missing
    awk -v name="$1" -v most="$4" '
        function value(hex,   mantissa, exponent, digits, i, v) { # awk reads no hexadecimal floats: 0x1.8p+1
            split(hex, mantissa, "p")
            exponent = mantissa[2]
            digits = substr(mantissa[1], 5)
            v = substr(mantissa[1], 3, 1)
            for (i = 1; i <= length(digits); i++) v += (index("0123456789abcdef", substr(digits, i, 1)) - 1) / 16 ^ i
            return v * 2 ^ exponent
        }
        FNR == NR { first[FNR] = value($1); n = FNR; next }
        { off = value($1) / first[FNR] - 1; if (off < 0) off = -off; if (off > worst) { worst = off; at = FNR }
          sum += value($1); count = FNR }
        END { printf "%s: %d steps, worst difference %.3f %% in step %d, mean loss %.4f\n", name, count, 100 * worst, at, sum / count
              exit !(n > 0 && count == n && 100 * worst < most) }' "$2" "$3"
}
